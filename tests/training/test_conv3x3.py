"""Convolutions of 3 x 3 on 64 channels: who uses their kernels, what is done around them, and how they compile."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import found_by

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget

from fedlas.training.accelerators import conv3x3

MOST_SHARED = 227 * 1024  # bytes that a program may have on a GPU of the kind
LINES = {"HEIGHT": 32, "WIDTH": 32, "IMAGES": 4, "C": 64, "SLOTS": conv3x3.SLOTS, "EVEN": True}
needs_gluon = pytest.mark.skipif(conv3x3.hopper is None, reason="needs a Triton with Gluon")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if conv3x3.hopper is None:
        pytest.skip("needs a Triton with Gluon")
    return found_by("conv3x3_case.py", tmp_path_factory)


@pytest.mark.campaign
def test_a_step_with_them_is_as_exact_as_one_without(found):
    for part, (ours, usual) in found["float16"]["far"].items():
        assert ours < 1.3 * usual, part
    for part, (ours, _) in found["beside a norm"]["far"].items():
        assert ours < 1e-5, part


@pytest.mark.campaign
def test_norms_after_them_are_not_summed_once_more(found):
    assert found["float16"]["convolved"] == ["layer1.0.bn1", "layer1.0.bn2"]
    assert not {"layer1.0.bn1", "layer1.0.bn2"} & set(found["float16"]["summed"])


@pytest.mark.campaign
def test_they_sum_for_the_norm_before_unless_it_was_added_to_another(found):
    assert found["float16"]["back"] == 2
    assert found["float16"]["seconds"] == [False, True]  # what the first layer gives is used twice
    beside = found["beside a norm"]
    assert len(beside["convolved"]) == 6
    # Back from the last; the third would be for two norms.
    assert beside["seconds"] == [False, True, False, False, True]
    assert beside["bits"] == [False, True, False, False, False]  # something was added in the block before


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"dtype": torch.float16}, True),
        ({"shape": (1024, 64, 64, 8)}, False),  # 64 programs
        ({"shape": (396, 64, 7, 32)}, True),  # 99 programs
        ({"shape": (128, 64, 32, 32)}, False),
        ({"shape": (540, 64, 32, 32)}, False),  # three in a second turn
        ({"shape": (512, 64, 32, 24)}, False),
        ({"shape": (512, 64, 2, 32)}, False),
        ({"dtype": torch.float32}, False),
        ({"weight": (64, 128, 3, 3)}, False),
        ({"weight": (64, 64, 1, 1)}, False),
        ({"layout": torch.contiguous_format}, False),
        ({"generation": 8}, False),
        ({"generation": 10}, False),
        ({"works": False}, False),
        ({"is_cuda": False}, False),
        ({"hopper": None}, False),
        ({"address": 520}, False),
        ({"shape": (512, 128, 32, 32)}, False),
        ({"shape": (0, 64, 32, 32)}, False),
        ({"shape": (512, 64, 32, 0)}, False),
        ({"images": torch.float32}, False),
        ({"multiprocessors": 114}, False),  # 14 programs in a second turn
        ({"multiprocessors": 64}, True),
    ],
)
@needs_gluon
def test_takes_what_keeps_a_gpu_of_the_kind_busy_alone(changes, taken, monkeypatch):
    class Images(torch.Tensor):
        is_cuda = changes.get("is_cuda", True)

        def data_ptr(self) -> int:
            return changes.get("address", 512)

    dtype, layout = changes.get("dtype", torch.bfloat16), changes.get("layout", torch.channels_last)
    shape, weight = changes.get("shape", (512, 64, 32, 32)), changes.get("weight", (64, 64, 3, 3))
    images = (
        torch.empty(shape, dtype=changes.get("images", dtype), device="meta")
        .contiguous(memory_format=layout)
        .as_subclass(Images)
    )
    generation = changes.get("generation", 9)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (generation, 0))
    about = SimpleNamespace(multi_processor_count=changes.get("multiprocessors", 132))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(conv3x3, "hopper", changes.get("hopper", conv3x3.hopper))
    monkeypatch.setattr(conv3x3, "_can_be_made", lambda _: changes.get("works", True))
    filters = torch.empty(weight, dtype=dtype, device="meta").contiguous(memory_format=layout)
    assert conv3x3.fits(images, filters) == taken


def compiled(kernel: Any, **about: Any) -> Any:
    """Compile a kernel for a GPU that need not be there."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    lines = f"tensordesc<bf16[4, 1, 32, 64],{gl.NVMMASharedLayout(128, 16, 4)!r}>"
    matrices = f"tensordesc<bf16[64, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
    known = dict.fromkeys(("x", "y", "dy"), lines) | {"w": matrices, "bits": "*u8"}
    known |= dict.fromkeys(("count", "blocks"), "i32") | dict.fromkeys(about, "constexpr")
    if "MASK" in about:
        known |= dict.fromkeys(("y", "second", "gradient"), "*bf16")
    kinds = {name: known.get(name, "*fp32") for name in kernel.arg_names}
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    aligned = {places[name]: [["tt.divisibility", 16]] for name, kind in kinds.items() if kind.startswith("*")}
    source = GluonASTSource(kernel, kinds, {places[name]: value for name, value in about.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": conv3x3.WARPS})


@needs_gluon
@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("back", [{}, {"HAS_SECOND": True, "MASK": "bits"}])
def test_conv1x1_of_a_line_are_under_way_at_once(back, tmp_path, monkeypatch):
    """As compiled for the GPUs they are for; where registers are read too early, ptxas lets each wait for the last."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = conv3x3.hopper.back_lines_kernel if back else conv3x3.hopper.lines_kernel
    made = compiled(kernel, **LINES, **back)
    assert made.metadata.shared <= MOST_SHARED
    assert made.asm["ptx"].count("wgmma.mma_async") == 3 * 9 * 4  # three lines, nine products, 64 channels
    assert made.asm["ptx"].count("wgmma.wait_group.sync.aligned 6;") == 3  # for the complete line alone
    said = made.asm["sass"]  # what runs, after ptxas
    assert said.count("HGMMA") == 3 * 9 * 4
    assert said.count("WARPGROUP.DEPBAR") == 3 + 1, "ptxas lets them wait for each other"
