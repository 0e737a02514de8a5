"""A run that was ended within an epoch and resumed ends with the bits of one that was not."""

import sys
from pathlib import Path

import pytest
import torch

import hapi

sys.path.insert(0, str(Path(__file__).parent / "distributed"))
import resume_within
from resume_within import EPOCHS, ROWS, Ended, EndsAt, Kept, Noisy, trained


@pytest.mark.parametrize("kind", [*resume_within.KINDS, "compiled"])
def test_the_same_bits(tmp_path, kind):
    resume_within.check(kind, tmp_path)


def test_what_was_trained_on_is_not_loaded_again(tmp_path):
    data = Noisy()
    with pytest.raises(Ended):
        trained("dataset", tmp_path, EndsAt(17), data=data)
    data.given = 0
    trained("dataset", tmp_path, data=data, resume=True)
    assert data.given == EPOCHS * ROWS - ROWS - 4 * 5


def test_a_state_that_loads_again_nothing(tmp_path):
    data = resume_within.Stateful()
    with pytest.raises(Ended):
        trained("stateful", tmp_path, EndsAt(8), data=data)
    fresh = resume_within.Stateful()
    trained("stateful", tmp_path, data=fresh, resume=True)
    assert fresh.read == 3 * 6 - 8


def test_a_save_that_another_rank_had_no_part_in_resumes_with_a_warning(tmp_path):
    """As if rank 0 alone had called save within an epoch."""
    with pytest.raises(Ended):
        trained("dataset", tmp_path, EndsAt(5))
    path = hapi.checkpoint.training_path(tmp_path / "step_5")
    content = torch.load(path, weights_only=True)
    content["position"]["cursor"]["ranks"] = None
    torch.save(content, path)
    with pytest.warns(UserWarning, match="logs will be those of its rest"):
        resumed = trained("dataset", tmp_path, Kept(), resume=True)
    assert resumed.kept[0] == [1, 2, 3]
