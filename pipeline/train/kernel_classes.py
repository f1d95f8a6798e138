"""What a kernel or an operator is for, by its name."""

import re

from pipeline.train.marks import HEAD, UPDATE

GEMM = "GEMM"
ATTENTION = "attention"
NORMS = "norms and elementwise"
HEAD_LOSS = "head and loss"
OPTIMIZER = "optimizer"
COMMUNICATION = "communication"
DATA_WAIT = "data wait"
OTHER = "other"
IDLE = "idle or host"

CATEGORIES = (
    GEMM, ATTENTION, NORMS, HEAD_LOSS, OPTIMIZER, COMMUNICATION, DATA_WAIT, OTHER, IDLE,
)  # fmt: skip

# The first that matches counts: flash kernels of CUTLASS and cuDNN have GEMM's words in their
# names, softmax and norms those of reductions.
_BY_NAME = tuple(
    (category, re.compile(words, re.IGNORECASE))
    for category, words in (
        (COMMUNICATION, r"nccl|gloo|^c10d::|all_?reduce|all_?gather|reduce_?scatter"),
        # torch's multi-tensor kernels and DeepSpeed's; nothing else of a step uses them.
        (OPTIMIZER, r"multi_tensor_apply|adam|lamb"),
        (OTHER, r"^mem(cpy|set)\b|^aten::(_to_copy|copy_|_pin_memory|_local_scalar_dense)$"),
        (
            ATTENTION,
            r"flash|fmha|sdpa|attention|attn|softmax"
            # Ours: pipeline/kernels/carried_kernels.py and turn_kernels.py.
            r"|^(forward|delta|turn|backward_(window|keys|queries))_kernel|triton_tem_\w*bmm",
        ),
        # On a CPU compiled code is one event: what torch.compile fuses is no product.
        (NORMS, r"layer_?norm|rms_?norm|residual|CompiledFxGraph"),
        (
            GEMM,
            r"gemm|nvjet|cutlass|xmma|cublas|wgmma|split_?k|triton_tem_|triton_mm"
            r"|^(void )?(ampere|hopper|sm\d\d)_|^aten::(mm|addmm|linear|matmul|_addmm_activation)$"
            r"|^(aten|mkldnn|mkl)::\w*linear",
        ),
        (
            NORMS,
            r"elementwise|vectorized|reduce|triton_|norm|dropout|native|index|gather|scatter"
            r"|embedding|cat_?array|copy|fill|sort|scan|cub::|rotary|transpose|where|^aten::",
        ),
    )
)

# An operator says more than the library's kernel that it launches: linear layers are `mm` and
# `addmm`, so that batched products are those of attention.
_BY_OPERATOR = {
    "aten::bmm": ATTENTION, "aten::baddbmm": ATTENTION, "aten::_softmax": ATTENTION,
    "aten::_softmax_backward_data": ATTENTION, "aten::mm": GEMM, "aten::addmm": GEMM,
}  # fmt: skip


def category(name: str, phase: str = "", operator: str = "") -> str:
    """One of `CATEGORIES`, `OTHER` for what is not known.

    Args:
        name: of a GPU's kernel or copy, or of an operator that a CPU runs.
        phase: of the host when it started it; `marks.HEAD` and `marks.UPDATE` say what it is for.
        operator: of torch that launched it, if there is one.
    """
    found = next((each for each, words in _BY_NAME if words.search(name)), OTHER)
    if found == COMMUNICATION:
        return found
    if phase == UPDATE:
        return OPTIMIZER
    if phase == HEAD:
        return HEAD_LOSS
    if found == OTHER:
        return found
    return _BY_OPERATOR.get(operator) or _BY_OPERATOR.get(name) or found
