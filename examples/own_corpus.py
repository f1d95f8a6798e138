"""From a folder of texts to an exported model: about a minute on a CPU at its default size.

    python examples/own_corpus.py                                   # Python's own help, 0.7 MB
    python examples/own_corpus.py --texts my/texts --out runs/mine --steps 2000

`--texts` is a folder of .txt, .md, .jsonl or compressed files, or one file. The model is tiny; for
a real one change the sizes in TRAIN (`model: {from: roformer_v2-base}` is a preset).

Expected output, without the progress of each step:

    $ postnorm prep run /tmp/own/prep.yaml
    2 shards, 8 blocks, vocabulary 2000, unigram entropy 6.048 nats
    step 300/300  loss 4.5916  acc 0.247  lr 1.79e-05  alpha 1.000 ...
    trained: 300 steps, held-out loss 4.08
    $ postnorm export /tmp/own/run /tmp/own/model
    /tmp/own/model: largest difference of logits 0.00e+00 over 512,000
    loaded: <Postnorm model: 2 layers of 128, 2,000 tokens, alpha 1, on cpu>
    vectors: (3, 128) float32
    mask: ' value' 0.03, ' class' 0.02, ' object' 0.02, ' instance' 0.02, ' list' 0.02
"""

import argparse
import json
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path

import postnorm

# Blocks this small are for a corpus this small; leave block_tokens out for more than 100 MB.
PREP = """\
output_dir: {out}/data
workers: 1
sources: [{{name: texts, inputs: [{texts}]}}]
tokenizer: {{vocab_size: 2000}}
shards: {{block_tokens: 16000, eval_fraction: 0.05}}
"""
TRAIN = """\
run_dir: {out}/run
model:
  {{num_layers: 2, hidden_size: 128, num_heads: 2, ffn_size: 512, score_residual: sum, init: unit}}
data: {{dir: {out}/data, seq_len: 64}}
train:
  {{num_steps: 300, global_batch: 32, micro_batch: 32, lr: 5e-3, warmup_steps: 20,
   alpha_warmup_steps: 20, precision: fp32}}
checkpoint: {{every_steps: 100}}
monitor: {{log_every_steps: 50, eval_every_steps: 100, eval_sequences: 64}}
"""


def main() -> None:
    """Prepare, train, export and try."""
    parser = argparse.ArgumentParser(description="a folder of texts to an exported model")
    parser.add_argument("--texts", type=Path, help="folder or file; default: Python's own help")
    parser.add_argument("--out", type=Path, default=Path("runs/own"), help="new folder")
    parser.add_argument("--steps", type=int, default=300, help="of training (default 300)")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    texts = arguments.texts or _python_s_help(out / "help.jsonl")
    names = {"out": json.dumps(str(out))[1:-1], "texts": json.dumps(str(texts.resolve()))}
    (out / "prep.yaml").write_text(PREP.format(**names))
    (out / "train.yaml").write_text(TRAIN.format(**names))

    _command("prep", "run", out / "prep.yaml")
    steps = arguments.steps
    warm_up = min(20, steps // 2)
    result = postnorm.pretrain(
        out / "train.yaml",
        {
            "train.num_steps": steps,
            "train.warmup_steps": warm_up,
            "train.alpha_warmup_steps": warm_up,
        },
    )
    if not result.finished:
        sys.exit(f"stopped at step {result.step}; the same command continues")
    print(f"trained: {result.step} steps, held-out loss {result.held_out_loss:.2f}")
    _command("export", result.run_dir, out / "model")

    model = postnorm.load(out / "model")
    print(f"loaded: {model}")
    vectors = model.encode(["a list of strings", "a tuple of numbers", "the end of the file"])
    print(f"vectors: {vectors.shape} {vectors.dtype}")
    for candidates in model.fill_mask("This function returns a [MASK] of the object."):
        print("mask:", ", ".join(f"{token!r} {share:.2f}" for token, share in candidates))


def _python_s_help(path: Path) -> Path:
    """Write the help topics that come with Python, a paragraph group a document."""
    with path.open("w", encoding="utf-8") as file:
        for topic, text in sorted(pydoc_data.topics.topics.items()):
            paragraphs = text.split("\n\n")
            for number in range(0, len(paragraphs), 4):
                part = "\n\n".join(paragraphs[number : number + 4])
                file.write(json.dumps({"id": f"{topic}/{number}", "text": part}) + "\n")
    return path


def _command(*words: object) -> None:
    """Run a command as in a shell."""
    print("$ postnorm", *words, flush=True)
    subprocess.run([sys.executable, "-m", "postnorm", *map(str, words)], check=True)


if __name__ == "__main__":
    main()
