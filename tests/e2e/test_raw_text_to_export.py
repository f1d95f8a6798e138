"""Raw text to an exported encoder with the commands that a user types, small."""

import json
from pathlib import Path

from pipeline.data.format import read_index
from tests.support import warm
from tests.support.ranks import Ranks, records


def test_raw_text_to_an_encoder(corpus: Path, tmp_path: Path, start_ranks: type[Ranks]) -> None:
    config = tmp_path / "prep.yaml"
    config.write_text(
        f"output_dir: {tmp_path / 'data'}\nworkers: 2\n"
        f"sources: [{{name: topics, inputs: [{corpus}]}}]\n"
        "tokenizer: {vocab_size: 1000}\nshards: {block_tokens: 8000, eval_fraction: 0.05}\n"
    )
    assert not warm.run("data_prep", "run", config).returncode
    run_dir, out = tmp_path / "run", tmp_path / "export"
    ranks = start_ranks(run_dir, read_index(tmp_path / "data"), "train.num_steps=20")
    assert ranks.wait() == [0, 0], ranks.output
    first, last = records(run_dir, "eval")[0]["loss"], records(run_dir, "eval")[-1]["loss"]
    assert last < first - 0.2, "it learned nothing"
    assert "largest difference of logits" in warm.run("pipeline", "export", run_dir, out).stdout
    assert json.loads((out / "config.json").read_text())["max_abs_diff"] <= 1e-3
    filled = warm.run("pipeline", "fill-mask", out, "a [MASK] b")
    assert filled.stdout.startswith("[MASK] 1: ")
