from pathlib import Path

import pytest

from fuligo.errors import ConfigError
from fuligo.models.directory import end_ids, load_tokenizer


def test_end_tokens_come_from_everywhere() -> None:
    class Source:
        def __init__(self, ids: object) -> None:
            self.eos_token_id = ids

    assert end_ids(Source([1, 2]), Source(3), Source(None)) == {1, 2, 3}
    assert end_ids(None, Source(3), None) == {3}


def test_a_tokenizer_whose_code_does_not_import_names_the_package(tmp_path: Path) -> None:
    """Kimi K2's tokenizer is code of the directory around a package."""
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["code.Own", null]}, "tokenizer_class": "Own"}')
    (tmp_path / "code.py").write_text("import a_package_that_nobody_has\n\n\nclass Own: ...\n")
    with pytest.raises(ConfigError, match="read the code, then use --trust-remote-code"):
        load_tokenizer(tmp_path, runs_its_code=False)
    with pytest.raises(ConfigError, match=r"imports a package that is not installed: .*a_package_that_nobody_has"):
        load_tokenizer(tmp_path, runs_its_code=True)
