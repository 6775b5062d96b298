from fuligo.models.directory import end_ids


def test_end_tokens_come_from_everywhere() -> None:
    class Source:
        def __init__(self, ids: object) -> None:
            self.eos_token_id = ids

    assert end_ids(Source([1, 2]), Source(3), Source(None)) == {1, 2, 3}
    assert end_ids(None, Source(3), None) == {3}
