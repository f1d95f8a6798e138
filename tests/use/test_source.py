"""What names a model: every form is read by every reader, and what fits no form is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.config.model import ModelConfig
from pipeline.data.format import DatasetIndex
from pipeline.errors import CheckpointError, PostnormError, RunFolderError
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.runtime import env
from pipeline.runtime.checkpoints import at_step, split_step
from pipeline.tokenizer.fast import BertOptions, word_piece
from pipeline.train.initial import tokenizer_differences
from pipeline.use.evaluate import EvaluateArguments, evaluate_config
from pipeline.use.export import export
from pipeline.use.folder import write_model
from pipeline.use.grow import grow
from pipeline.use.hf import export_hf
from pipeline.use.model import load
from pipeline.use.source import initial_weights, is_run, load_source
from pipeline.use.surgery import read_vocabulary
from tests.support import warm, words
from tests.support.checkpoints import make_checkpoint

pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.long]

_SAVE = """\
import sys, transformers
folder, out, how = sys.argv[1:]
auto = transformers.AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
if how != "saved":
    tokenizer.add_tokens(["zzzyx", "qqqyx"])
if how == "resized":
    auto.resize_token_embeddings(len(tokenizer))
if how == "shards":
    auto.save_pretrained(out, max_shard_size="20KB")
else:
    auto.save_pretrained(out)
tokenizer.save_pretrained(out)
"""


def _saved(folder: Path, out: Path, how: str) -> Path:
    """What transformers saves of an export: as it was, in shards, or with two more tokens."""
    variables = env.child_environment(HF_HUB_OFFLINE="1", HF_MODULES_CACHE=str(out.parent))
    done = env.run_script(_SAVE, folder, out, how, cwd=out.parent, variables=variables)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def forms(straight_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One model in every form, as a user names it."""
    folder = tmp_path_factory.mktemp("forms")
    export(straight_run, folder / "own")
    export_hf(f"{straight_run}@40", folder / "hf")
    return {
        "run": str(straight_run),
        "step": f"{straight_run}@40",
        "own": str(folder / "own"),
        "hf": str(folder / "hf"),
        "saved": str(_saved(folder / "hf", folder / "saved", "saved")),
    }


@pytest.mark.parametrize("form", ["run", "step", "own", "hf", "saved"])
def test_every_form_is_the_same_model(
    form: str, forms: dict[str, str], dataset: DatasetIndex, tmp_path: Path
) -> None:
    expected = load_source(forms["run"]).model
    export(forms[form], tmp_path / "copy")
    grow(forms[form], tmp_path / "deep", width=1, depth=4, noise=0, seed=0)
    for found in (load_source(forms[form]).model, load_source(tmp_path / "copy").model):
        for name, tensor in found.state_dict().items():
            assert torch.equal(tensor, expected.state_dict()[name]), name
    # The tokenizer of an export is the dataset's, piece by piece, in another file.
    start = initial_weights(forms[form])
    assert tokenizer_differences(start.tokenizer, dataset) == ([], [])
    for name in ("copy", "deep"):
        assert load(tmp_path / name).tokenizer is not None
    if form not in ("run", "step"):
        config = evaluate_config(EvaluateArguments(Path(forms[form]), data=str(dataset.folder)))
        assert config.data.dir == str(dataset.folder)


def test_verbs_take_a_step_and_answer_the_words_of_other_tools(
    straight_run: Path, tmp_path: Path
) -> None:
    done = warm.run("pipeline", "export", f"{straight_run}@30", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out/config.json").read_text())["step"] == 30
    assert "largest difference of logits" in done.stdout
    done = warm.run("pipeline", "evaluate", f"{straight_run}@30", "--step", "40")
    assert done.returncode == 2
    assert "leave out --step" in done.stderr
    done = warm.run("pipeline", "export", straight_run, tmp_path / "no", "--revision=step30")
    assert done.returncode == 2
    assert "runs/mine@best" in done.stderr


def test_best_is_the_checkpoint_with_the_lowest_loss_of_its_own_step(tmp_path: Path) -> None:
    for step, loss in ((10, 5.0), (20, 3.0), (30, 3.0), (40, float("nan")), (50, None)):
        make_checkpoint(tmp_path, step, held_out_loss=loss)
    assert at_step(tmp_path, "best").name == "step-00000030"
    shutil.rmtree(tmp_path / "checkpoints/step-00000030")
    assert at_step(tmp_path, "best").name == "step-00000020"
    make_checkpoint(tmp_path / "other", 7)
    with pytest.raises(CheckpointError, match="of steps 7 has a held-out loss"):
        at_step(tmp_path / "other", "best")


@pytest.mark.parametrize(
    ("text", "step"),
    [("runs/a", None), ("runs/a@40_000", 40000), ("runs/a@best", "best"), ("me@home/a", None),
     ("runs/a@", None), ("runs/a@last", None)],
)  # fmt: skip
def test_words_that_name_a_step(text: str, step: int | str | None) -> None:
    assert split_step(text) == (Path(text.rpartition("@")[0] if step else text), step)


def test_a_run_with_an_export_in_it_is_a_run(forms: dict[str, str], tmp_path: Path) -> None:
    run = shutil.copytree(forms["run"], tmp_path / "run")
    shutil.copytree(forms["own"], run / "model")
    assert is_run(run)
    assert load_source(f"{run}@30").facts["step"] == 30
    assert "max_abs_diff" not in load_source(run).facts  # those of an export have it


def test_a_folder_whose_name_has_such_an_end_is_itself(tmp_path: Path) -> None:
    folder = tmp_path / "v@2"
    folder.mkdir()
    assert split_step(folder) == (folder, None)


@pytest.mark.parametrize("reader", [load, initial_weights])
def test_what_fits_no_form_is_named(reader: Callable[[str], object], forms: dict[str, str]) -> None:
    for source, kind, facts in (
        ("bert-base-chinese", RunFolderError, ("hf download bert-base-chinese",)),
        ("org/model-1.5", RunFolderError, ("hf download org/model-1.5", "models/model-1.5")),
        (f"{forms['own']}@3", CheckpointError, ("without steps", "3")),
        (f"{forms['run']}@31", CheckpointError, ("no checkpoint of step 31", "30, 40")),
    ):
        with pytest.raises(kind) as caught:
            reader(source)
        for fact in facts:
            assert fact in str(caught.value)
    with pytest.raises(PostnormError, match="names a step already"):
        load_source(f"{forms['run']}@30", 40)


def test_words_of_an_export_are_cut_alike_after_it_was_saved(tmp_path: Path) -> None:
    texts, folder = words.texts(120), tmp_path / "own"
    pieces = words.rows(texts, words=60)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(word_piece(pieces, BertOptions(words="jieba"), folder))
    config = ModelConfig(vocab_size=len(pieces), num_layers=1, hidden_size=8, num_heads=2)
    write_model(folder, config, dict(MaskedLanguageModel(config).state_dict()), {})
    export_hf(folder, tmp_path / "hf")
    saved = load_source(_saved(tmp_path / "hf", tmp_path / "saved", "saved")).require_tokenizer()
    expected = load_source(folder).require_tokenizer()
    given = read_vocabulary(tmp_path / "saved" / "tokenizer.json", expected)
    assert [given.encode(text) for text in texts] == [expected.encode(text) for text in texts]
    assert [saved.encode(text) for text in texts] == [expected.encode(text) for text in texts]


def test_changed_exports(forms: dict[str, str], tmp_path: Path) -> None:
    """Shards are joined, rows of added tokens are there, and tokens without rows are refused."""
    hf = Path(forms["hf"])
    trained = load_source(_saved(hf, tmp_path / "resized", "resized"))
    original = load_source(hf)
    rows, old = (each.model.encoder.token_embedding.weight for each in (trained, original))
    assert len(rows) == len(old) + 2
    assert torch.equal(rows[:-2], old)
    [added] = trained.require_tokenizer().encode("zzzyx")
    assert added == len(old)

    shards = _saved(hf, tmp_path / "shards", "shards")
    assert (shards / "model.safetensors.index.json").exists()
    with pytest.raises(CheckpointError) as caught:
        load_source(shards)  # with the two tokens, of which the embedding knows nothing
    assert f"{len(old) + 2:,} tokens, the embedding {len(old):,} rows" in str(caught.value)
    shutil.copyfile(hf / "tokenizer.json", shards / "tokenizer.json")
    again = load_source(shards).model.state_dict()
    assert all(torch.equal(again[name], each) for name, each in original.model.state_dict().items())
