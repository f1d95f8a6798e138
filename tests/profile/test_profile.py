"""Where time goes: names of kernels, hand-made traces with known sums, and a real profile."""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.data.format import DatasetIndex
from pipeline.profile.step import (
    ATTENTION,
    CATEGORIES,
    COMMUNICATION,
    DATA_WAIT,
    GEMM,
    HEAD_LOSS,
    IDLE,
    NORMS,
    OPTIMIZER,
    OTHER,
    attention_work,
    category,
    name_kinds,
    read_timeline,
)
from pipeline.train.timing import BEGIN, BODY, DATA, END, FORWARD, HEAD, PREFIX, UPDATE
from tests.support.processes import python
from tests.support.ranks import CONFIG, Starter, finish

# As torch's profiler writes them on A100 and H100 (PyTorch 2.1 to 2.11), parameters cut.
KERNELS = {
    GEMM: [
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
        "nvjet_tst_128x256_64x4_2x1_v_bz_NTN",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16, float, __nv_bfloat16>",
        "triton_tem_fused_mm_4", "void gemmk1_kernel<int, float, 256, 5, false, false, false>",
    ],
    ATTENTION: [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>",
        "fmha_cutlassB_bf16_aligned_128x64_k64_sm80",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>",
        "triton_per_fused__softmax_masked_fill_0", "forward_kernel", "backward_keys_kernel",
        "backward_queries_kernel", "backward_window_kernel", "delta_kernel", "turn_kernel",
        "turn_back_kernel",
    ],
    NORMS: [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps>>",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<c10::BFloat16, float>",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long>",
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>>",
        "triton_red_fused_add_mean_mul_pow_rsqrt_3", "residual_norm_kernel",
        "## Call CompiledFxGraph fhzxphvdkz677ivpm4ylyqm2v5gxjkqw7sllirmbi4gqm3kyeipl ##",
    ],
    OPTIMIZER: [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
    ],
    COMMUNICATION: [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ],
    OTHER: ["Memcpy HtoD (Pinned -> Device)", "something_nobody_knows"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wanted"), [(name, kind) for kind, names in KERNELS.items() for name in names]
)
def test_kernel_names(name: str, wanted: str) -> None:
    assert category(name, FORWARD) == wanted
    assert category(name, UPDATE) == (COMMUNICATION if wanted == COMMUNICATION else OPTIMIZER)
    in_head = COMMUNICATION if wanted == COMMUNICATION else HEAD_LOSS
    assert category(name, HEAD) == in_head


def _event(kind: str, name: str, start: float, duration: float, **more: Any) -> SimpleNamespace:
    """As an event of torch's profiler, in microseconds."""
    return SimpleNamespace(activity_type=kind, name=name,
                           time_range=SimpleNamespace(start=start, end=start + duration),
                           **{"thread": 1, "id": 0, "linked_correlation_id": 0, "cpu_parent": None,
                              "self_cpu_time_total": duration, **more})  # fmt: skip


def _mark(phase: str, start: float) -> SimpleNamespace:
    return _event("user_annotation", PREFIX + phase, start, 0.0)


def test_a_trace_of_a_gpu() -> None:
    """Kernels run later than they are launched; one stream computes, the other one sends."""

    def kernel(name: str, launched: float, ts: float, dur: float, number: int) -> list[Any]:
        return [
            _event("cuda_runtime", "cudaLaunchKernel", launched, 1, thread=2, id=number),
            _event("kernel", name, ts, dur, thread=7, id=number),
        ]

    marks = {BEGIN: 0, FORWARD: 1000, HEAD: 1200, BODY: 1400, UPDATE: 1600, DATA: 1800, END: 6000}
    events = [
        _mark(DATA, 0), *(_mark(phase, ts) for phase, ts in marks.items()),
        *kernel("nvjet_tst", 1010, 1500, 500, 1),  # launched in the body, runs in the update
        *kernel("nvjet_tst", 1210, 2000, 300, 2),  # of the head
        *kernel("triton_poi_fused_add", 1410, 2300, 200, 3),
        *kernel("ncclDevKernel_AllReduce", 1610, 2400, 600, 4),  # 100 of it behind the one before
        *kernel("Memcpy DtoD", 1620, 2900, 200, 5),  # nccl behind 100 of it
        *kernel("triton_poi_fused_add", 1630, 3200, 50, 6),  # of the update
    ]  # fmt: skip
    found = read_timeline(events)
    assert found.wall_ms == 6
    wanted = dict.fromkeys(CATEGORIES, 0.0) | {
        # A copy in the update belongs to it, and counts before what is sent.
        GEMM: 0.5, HEAD_LOSS: 0.3, NORMS: 0.2, COMMUNICATION: 0.4, OPTIMIZER: 0.2 + 0.05,
        # The host waits until 1000, and from 1800 on: before the last kernel, and after it.
        DATA_WAIT: 1.0 + 0.1 + 2.75, IDLE: 0.5,
    }  # fmt: skip
    assert found.by_category == pytest.approx(wanted)
    assert sum(found.by_category.values()) == pytest.approx(found.wall_ms)
    assert found.by_name[COMMUNICATION, "ncclDevKernel_AllReduce"] == 0.6


def test_events_of_a_torch_that_does_not_name_their_kinds() -> None:
    """Torch 2.11 says where an event was, and of operators that launch kernels their ids alone."""
    kinds = ["user_annotation", "gpu_user_annotation", "cpu_op", "cuda_runtime", "cuda_driver",
             "kernel", "gpu_memcpy", "gpu_memset"]  # fmt: skip
    names = [PREFIX + FORWARD, PREFIX + FORWARD, "aten::mm", "cudaLaunchKernel", "cuLaunchKernelEx",
             "nvjet_tst", "Memcpy DtoH (Device -> Pinned)", "Memset (Device)"]  # fmt: skip
    events = [
        SimpleNamespace(name=name, id=number, is_user_annotation="annotation" in kind,
                        device_type=SimpleNamespace(
                            name="CUDA" if kind.startswith(("gpu", "kernel")) else "CPU"))
        for number, (kind, name) in enumerate(zip(kinds, names, strict=True))
    ]  # fmt: skip
    name_kinds(events, {5: 2, 6: 0})
    # Runtime and driver both launch.
    wanted = ["cuda_runtime" if kind == "cuda_driver" else kind for kind in kinds]
    wanted[-1] = "gpu_memcpy"  # which counts the same
    assert [event.activity_type for event in events] == wanted
    assert [event.linked_correlation_id for event in events] == [0, 0, 0, 0, 0, 2, 0, 0]


def test_a_trace_of_a_cpu() -> None:
    """Inner operators count before outer ones; other threads do not count."""
    linear = _event("cpu_op", "aten::linear", 100, 400, self_cpu_time_total=100)
    addmm = _event("cpu_op", "aten::addmm", 150, 300, cpu_parent=linear, self_cpu_time_total=260)
    events = [
        *(_mark(phase, ts) for phase, ts in ((BEGIN, 0), (FORWARD, 0), (DATA, 900), (END, 1000))),
        linear, addmm, _event("cpu_op", "aten::copy_", 160, 40, cpu_parent=addmm),
        _event("cpu_op", "aten::bmm", 500, 100), _event("cpu_op", "aten::mul", 600, 100),
        _event("cpu_op", "aten::mul", 0, 1000, thread=2),
    ]  # fmt: skip
    found = read_timeline(events)
    shares = {GEMM: 0.4, ATTENTION: 0.1, NORMS: 0.1, DATA_WAIT: 0.1, IDLE: 0.3}
    wanted = dict.fromkeys(CATEGORIES, 0.0) | shares
    assert found.by_category == pytest.approx(wanted)


def test_work_and_batched_products_of_attention() -> None:
    """As the study of the kernels counts: base, 32 sequences of 512, 12 heads of 64."""
    tokens, pairs = 32 * 512, 32 * 512**2
    plain = attention_work(tokens, pairs, 12, 64, carries=False, longest=512)
    carried = attention_work(tokens, pairs, 12, 64, carries=True, longest=512)
    short = attention_work(tokens, 128 * 128**2, 12, 64, carries=True, longest=128)
    assert plain.flops == 12 * 12 * pairs * 64
    assert carried.num_bytes - plain.num_bytes == 12 * 12 * pairs
    assert short.num_bytes - plain.num_bytes == 10 * 12 * 128 * 128**2
    # 989 TFLOP/s and 4.8 TB/s: plain is bound by computing, carried by memory.
    assert plain.least_s("NVIDIA H200") == pytest.approx(plain.flops / 989e12)
    assert carried.least_s("NVIDIA H200") == pytest.approx(carried.num_bytes / 4.8e12)
    assert plain.least_s("cpu") is None
    gemm = "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT"
    assert category(gemm, FORWARD, "aten::bmm") == ATTENTION
    assert category(gemm, FORWARD, "aten::addmm") == GEMM
    assert category("aten::bmm", BODY) == ATTENTION


def _command(folder: Path, dataset: DatasetIndex, *words: object) -> list[str]:
    """Of two steps; writes p.json."""
    (folder / "run.yaml").write_text(CONFIG)
    every = ["-m", "pipeline", "profile", folder / "run.yaml", f"run_dir={folder / 'run'}",
             f"data.dir={dataset.folder}", *words, "--steps", "2", "--warm-up", "1", "--json",
             folder / "p.json"]  # fmt: skip
    return [str(word) for word in every]


def _checked(folder: Path) -> dict[str, Any]:
    """The profile that was written; of no run there is a folder."""
    found: dict[str, Any] = json.loads((folder / "p.json").read_text())
    assert list(found["categories_ms"]) == list(CATEGORIES)
    assert sum(found["categories_ms"].values()) == pytest.approx(found["step_ms"])
    for part in (GEMM, ATTENTION, NORMS, HEAD_LOSS, OPTIMIZER):
        assert found["categories_ms"][part] > 0, part
    assert found["steps"] == 2
    assert 0 < found["tokens_per_s"] <= 8 * 64 / found["untraced_step_ms"] * 1e3
    assert not (folder / "run").exists()
    return found


@pytest.mark.usefixtures("processes")
def test_profile_of_a_run(dataset: DatasetIndex, tmp_path: Path) -> None:
    trace = tmp_path / "t.json.gz"
    command = _command(tmp_path, dataset, "train.zero_stage=0", "--trace", trace)
    said = python(*command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found = _checked(tmp_path)
    for name, ms in found["categories_ms"].items():
        assert re.search(rf"^{re.escape(name)} +{ms:.2f} ", said, re.MULTILINE)
    assert "no roofline" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.json", "run.yaml", "t.json.gz"]


def test_profile_of_ranks(dataset: DatasetIndex, tmp_path: Path, start_command: Starter) -> None:
    log = tmp_path / "out"
    finish(start_command([sys.executable, *_command(tmp_path, dataset)], 2, log), log)
    found = _checked(tmp_path)
    assert found["num_ranks"] == 2
    assert found["categories_ms"][COMMUNICATION] > 0
    assert log.read_text().count("of roofline") == 1
