"""Images stay with their prompt, however its samples end."""

from dataclasses import replace

import pytest

from fuligo.rollout.custom_source import CustomSource
from fuligo.rollout.source import GroupSource, new_group
from fuligo.types import Prompt, PromptImage, Sample, SampleGroup
from tests.unit.rollout.scripted import Rows, ScriptedEngine, by_row, world

IMAGE = PromptImage("7.png", b"pixels", "digest", 1, 2, 3)


class Pictures(Rows):
    """Source of one prompt with an image; keeps the groups that were put back."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = [replace(prompt, images=(IMAGE,)) for prompt in super().take(1)]

    def take(self, num_prompts: int, /) -> list[Prompt]:
        return [self.waiting.pop(0) for _ in range(num_prompts)]

    def give_back(self, prompts: list[Prompt], /) -> None:
        self.waiting += prompts


class AlwaysPictures(Rows):
    """Numbered rows with an image each."""

    def take(self, num_prompts: int, /) -> list[Prompt]:
        return [replace(prompt, images=(IMAGE,)) for prompt in super().take(num_prompts)]


class Album:
    """User's data source of one group; keeps the groups that were put back."""

    def __init__(self) -> None:
        self.waiting = [[Sample(0, 0, "", Rows().take(1)[0].prompt_ids, images=(IMAGE,))]]

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        return [self.waiting.pop(0)]

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.waiting += groups


def images_of(groups: list[SampleGroup]) -> set[tuple[PromptImage, ...]]:
    return {sample.images for group in groups for sample in group.samples}


@pytest.mark.parametrize("partial_rollout", [False, True])
@pytest.mark.parametrize("kind", ["data", "hook"])
def test_groups_that_come_back_have_their_images(partial_rollout, kind):
    if kind == "data":
        source = GroupSource(Pictures(), 2, partial_rollout=partial_rollout)
    else:
        source = CustomSource(Album(), partial_rollout=partial_rollout)
    first = source.draw(1, 0, 0).groups
    source.put_back(first)
    assert images_of(first) == images_of(source.draw(1, 1, 0).groups) == {(IMAGE,)}


class Observer(ScriptedEngine):
    """Engine that remembers the images of its requests."""

    async def generate(self, input_ids, params, *, images=(), **kwargs):
        self.log.append(images)
        return await super().generate(input_ids, params, images=images, **kwargs)


async def test_requests_have_the_images_of_their_prompt_also_continued_ones():
    engine = Observer(by_row({1: 120}))
    given = world(engine=engine, rows=AlwaysPictures(), over_sampling_batch_size=3, partial_rollout=True)
    for step in range(2):
        await given.runner.rollout(step)
    seen = [images for images in engine.log if not isinstance(images, str)]
    assert len(seen) > 8 and set(seen) == {(IMAGE,)}


def test_samples_of_an_evaluation_have_their_images():
    assert images_of([new_group(Pictures().take(1)[0], 0, 2)]) == {(IMAGE,)}
