"""Go on from a published BERT: convert it, pre-train it on your text, export it for transformers.

    python examples/continue_bert.py bert-base-uncased/ --texts my/texts --steps 1000

The folder is what `huggingface-cli download google-bert/bert-base-uncased` writes: config.json,
model.safetensors and vocab.txt or tokenizer.json; nothing is downloaded here. A few steps of
bert-base take minutes on a CPU; on a GPU raise --batch and --length to what its memory takes.

Expected output, without the progress of each step, of a BERT of 2 layers of 64 with random weights
and 50 steps:

    $ postnorm convert published /tmp/on/bert
    /tmp/on/bert: bert, 182,386 parameters
    $ postnorm prep run /tmp/on/prep.yaml
    2 shards, 11 blocks, vocabulary 1202, unigram entropy 5.008 nats
    weights are those of /tmp/on/bert
    step 50/50  loss 7.0120  acc 0.021  lr 1.11e-06  alpha 1.000 ...
    held-out loss: 7.108 at first, 6.999 now
    $ postnorm export /tmp/on/run /tmp/on/hf --format hf
    /tmp/on/hf: largest difference of logits 2.09e-07 over 307,712
    vectors moved by 0.0628 on average
    for transformers: AutoModelForMaskedLM.from_pretrained('/tmp/on/hf')
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import postnorm

PREP = """\
output_dir: {out}/data
workers: 1
sources: [{{name: texts, inputs: [{texts}]}}]
tokenizer: {{file: {out}/bert/tokenizer.json}}
shards: {{block_tokens: 16000, eval_fraction: 0.05}}
"""


def main() -> None:
    """Convert, prepare with the same tokenizer, train from the weights, export."""
    parser = argparse.ArgumentParser(description="go on from a published BERT")
    parser.add_argument("bert", type=Path, help="Hugging Face folder")
    parser.add_argument("--texts", type=Path, required=True, help="folder or file")
    parser.add_argument("--out", type=Path, default=Path("runs/continued"), help="new folder")
    parser.add_argument("--steps", type=int, default=100, help="of training (default 100)")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step (default 16)")
    parser.add_argument("--length", type=int, default=128, help="of a sequence (default 128)")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    _command("convert", arguments.bert, out / "bert")
    before = postnorm.load(out / "bert")
    names = {"out": json.dumps(str(out))[1:-1], "texts": json.dumps(str(arguments.texts.resolve()))}
    (out / "prep.yaml").write_text(PREP.format(**names))
    _command("prep", "run", out / "prep.yaml")

    # JSON is YAML. The run has the model's own architecture; a trained model needs no alpha warm-up
    # (0 is the default), but a learning rate well below that of pre-training from scratch.
    config = {
        "run_dir": f"{out}/run",
        "init_from": f"{out}/bert",
        "model": dataclasses.asdict(before.config),
        "data": {"dir": f"{out}/data", "seq_len": arguments.length},
        "train": {
            "num_steps": arguments.steps,
            "global_batch": arguments.batch,
            "micro_batch": arguments.batch,
            "lr": 5e-5,
            "warmup_steps": arguments.steps // 10,
        },
        "checkpoint": {"every_steps": arguments.steps},
        "monitor": {"log_every_steps": 10, "eval_every_steps": arguments.steps},
    }
    (out / "train.yaml").write_text(json.dumps(config, indent=1))
    result = postnorm.pretrain(out / "train.yaml")
    if not result.finished:
        sys.exit(f"stopped at step {result.step}; the same command continues")
    records = map(json.loads, (result.run_dir / "metrics.jsonl").read_text().splitlines())
    first = next(record["loss"] for record in records if record["kind"] == "eval")
    print(f"held-out loss: {first:.3f} at first, {result.held_out_loss:.3f} now")

    _command("export", result.run_dir, out / "hf", "--format", "hf")
    after = postnorm.load(out / "hf")
    texts = ["A short text.", "Another one, which is longer."]
    moved = abs(after.encode(texts) - before.encode(texts)).mean()
    print(f"vectors moved by {moved:.4f} on average")
    print(f"for transformers: AutoModelForMaskedLM.from_pretrained({str(out / 'hf')!r})")


def _command(*words: object) -> None:
    """Run a command as in a shell."""
    print("$ postnorm", *words, flush=True)
    subprocess.run([sys.executable, "-m", "postnorm", *map(str, words)], check=True)


if __name__ == "__main__":
    main()
