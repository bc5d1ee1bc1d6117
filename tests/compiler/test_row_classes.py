"""Programs of a GPU: each bucket launches the kernel of its own row class, and an op's launches stand side by side on the same buffers."""

from itertools import pairwise
from pathlib import Path

import pytest

from tapeout.codegen.nvidia.overrides import linear_many_sm90
from tapeout.compiler.driver import Planned, Watch, plan
from tapeout.compiler.settings import Settings
from tapeout.models.deepseek_v41.config import load_config
from tapeout.models.tiny import write_tiny

BUCKETS = (16, 128, 512)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    config = load_config(Path(write_tiny(tmp_path_factory.mktemp("tiny"), 0)))
    found = plan(config, Settings(target="sm90", max_rows=BUCKETS[-1], buckets=BUCKETS, max_context=512), Watch())
    assert found is not None
    return found


def rows(planned: Planned, bucket: int, family: str) -> list[dict[str, int]]:
    """Schedule rows of a family's own launches in one bucket."""
    launches = planned.programs["encoder"][str(bucket)].launches
    found = [planned.kernels[launch.kernel].choice for launch in launches]
    return [dict(choice.schedule) for choice in found if choice.family == family and "part" not in dict(choice.schedule)]


def test_buckets_launch_their_own_kernels(planned: Planned) -> None:
    few, some, many = (rows(planned, bucket, "linear") for bucket in BUCKETS)
    assert len(few) == len(some) == len(many) > 3
    assert {row["block_m"] for row in few} == {16} and {row["decoded"] for row in few} == {1}
    for one, more in zip(some, many, strict=True):
        if more == one:
            assert one["override"] == 1 and one["block_m"] == 16  # a narrow layer has one row
            continue
        assert one["block_m"] == 64 and one["decoded"] in (1, 2)
        assert more["decoded"] == 3 or more.get("override", 0) == linear_many_sm90.PLACE
    assert [row["segments"] for row in few] == [row["segments"] for row in many]


def test_parts_stand_in_front_of_their_op_on_its_buffers(planned: Planned) -> None:
    seen = 0
    for bucket in BUCKETS:
        launches = planned.programs["encoder"][str(bucket)].launches
        for launch, following in pairwise(launches):
            choice = planned.kernels[launch.kernel].choice
            if "part" not in dict(choice.schedule):
                continue
            seen += 1
            assert not launch.cost and following.buffers == launch.buffers
            assert following.after == (1,)  # it takes what this one makes, whatever else they share
            assert planned.kernels[following.kernel].choice.request == choice.request
    assert seen > 10


def test_every_kernel_is_launched_by_some_bucket(planned: Planned) -> None:
    launched = {launch.kernel for buckets in planned.programs.values() for program in buckets.values() for launch in program.launches}
    assert launched == set(range(len(planned.kernels)))


def test_the_loader_is_told_of_scales_that_an_override_cannot_multiply_by(planned: Planned) -> None:
    """Wide linear layers take scales from 2^-92 to 2^39; narrow ones, and experts as small as the tiny model's, take all."""
    found = {o.name: (p.least_scale, p.most_scale) for o in planned.weights.operands for p in o.parts if p.part == "scales"}
    assert found["layers.0.attn.wq_a+wkv"] == (127 - 92, 127 + 39)
    assert found["layers.0.attn.wo_a"] == found["layers.0.ffn.experts.w1+w3"] == (None, None)
    assert all((p.least_scale, p.most_scale) == (None, None) for o in planned.weights.operands for p in o.parts if p.part != "scales")
