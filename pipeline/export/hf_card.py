"""The model card of an exported folder: what the model is, what it was trained on, how well."""

import json
from dataclasses import asdict

from pipeline.export.folder import TrainedModel

_NATIVE_LOADING = """\
```python
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer
model = AutoModelForMaskedLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
"""
_OWN_LOADING = """\
The architecture is in `modeling_postnorm.py`, which needs torch and transformers only.
```python
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer
model = AutoModelForMaskedLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
```
"""


def model_card(name: str, trained: TrainedModel, family: str | None, max_abs_diff: float) -> str:
    """Markdown with the metadata block that model hubs read.

    Args:
        name: of the folder.
        trained: the model and where it comes from.
        family: transformers' own class that it was written for, if any.
        max_abs_diff: largest difference of logits between transformers and the trainer's model.
    """
    config, facts = trained.model.config, trained.facts
    num_parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    scores = facts.get("scores") or {}
    rows = {
        "parameters": f"{num_parameters:,}",
        "optimizer steps": facts.get("step", "unknown"),
        "data fingerprint": facts.get("data_fingerprint", "unknown"),
        "held-out loss": f"{scores['loss']:.4f} nats a masked token" if scores else "unknown",
        "held-out accuracy": f"{scores['accuracy']:.4f}" if scores else "unknown",
        "converted from": facts.get("converted_from", {}).get("path", "no other format"),
        "logits against the trainer's model": f"at most {max_abs_diff:.2e} apart",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    loading = (_NATIVE_LOADING if family else _OWN_LOADING).format(name=name)
    return (
        "---\nlibrary_name: transformers\npipeline_tag: fill-mask\ntags: [postnorm, encoder]\n---\n"
        f"# {name}\n\nA bidirectional encoder, pre-trained with masked language modelling.\n\n"
        f"| | |\n|---|---|\n{table}\n\n## Loading\n\n{loading}\n## Architecture\n\n```json\n"
        f"{json.dumps(asdict(config), indent=1)}\n```\n"
    )
