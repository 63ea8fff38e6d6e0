"""Memory estimated from a configuration, beside peaks that were measured and tables that are printed."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from typer.testing import CliRunner

from ludus.cli.main import app
from ludus.core.failures import ConfigError
from ludus.training import LoraConfig
from ludus.training.config.recipe import Recipe
from ludus.training.config.run import ModelConfig
from ludus.training.models.loading import load_model
from ludus.training.optim import fitting
from ludus.training.optim.estimate import GIB, Load, model_size, training_memory
from ludus.training.optim.fitting import memory_note, plans_for

ROOT = Path(__file__).parents[2]
H200 = int(139.8 * GIB)
SHAPES: dict[str, tuple[str, int, int, int, int, int, bool]] = {
    "Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, True),
    "Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, True),
    "Qwen2.5-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, True),
    "Qwen3-1.7B": ("qwen3", 2048, 6144, 28, 16, 8, True),
    "Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, True),
    "Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 28, 4, False),
    "Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 8, False),
    "Qwen3-14B": ("qwen3", 5120, 17408, 40, 40, 8, False),
    "Qwen3-32B": ("qwen3", 5120, 25600, 64, 64, 8, False),
}


def config_of(name: str) -> Any:
    family, width, inner, layers, heads, kv_heads, tied = SHAPES[name]
    return AutoConfig.for_model(
        family,
        vocab_size=152064 if name == "Qwen2.5-7B" else 151936,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width // heads if family == "qwen2" else 128,
        tie_word_embeddings=tied,
    )


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading."""
    _, _, rest = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(heading)
    table = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    assert table is not None
    lines = table.group().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_peaks_of_the_h200_are_met_within_15_percent() -> None:
    seen = 0
    for cells in rows_of("performance.md", "\n### Training\n"):
        shape, _, how = cells[0].partition(", ")
        if "GiB" in how:
            continue  # the budget of activations decides, which is not a load
        size = model_size(config_of(f"Qwen2.5-{shape}"), torch.bfloat16)
        load = Load(
            tokens=8192 if "two passes" in how else 16384,
            trained=0.5 if how == "ragged" else 1.0,
            passes=2 if "two passes" in how else 1,
            checkpointed=size.costs.layers if "recomputed" in how else 0,
        )
        peak = training_memory(size, load, H200).peak / GIB
        assert peak == pytest.approx(float(cells[5]), rel=0.15), cells
        seen += 1
    assert seen == 8
    for shape, adapter, *_, measured in rows_of("performance.md", "\n### Adapters\n"):
        if adapter == "beside joined products":
            size = model_size(config_of(f"Qwen2.5-{shape}"), torch.bfloat16, LoraConfig(rank=16))
            peak = training_memory(size, Load(passes=1), H200).peak / GIB
            assert peak == pytest.approx(float(measured), rel=0.15)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SHAPES if name[-3:] not in ("-8B", ".5B")]


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen3-8B", *SLOW])
def test_the_table_of_questions_is_the_estimate(name: str) -> None:
    rows = {row[0]: row[1:] for row in rows_of("faq.md", "## Will it fit?")}
    assert list(rows) == list(SHAPES)
    billions, once, several, base, cache = rows[name]
    size = model_size(config_of(name), torch.bfloat16)
    one, more = (training_memory(size, Load(passes=n), H200) for n in (1, 2))
    # the sum of several is float32, beside the gradient of the last pass as it is made
    both = more.resident + more.gradients + size.trained_bytes
    assert billions == f"{size.parameters / 1e9:.2f}"
    assert once == f"{(one.resident + one.gradients) / GIB:.0f}"
    assert several == f"{both / GIB:.0f}"
    assert float(base) == pytest.approx(size.weight_bytes / GIB, abs=0.051)
    assert size.token_bytes == 1024 * int(cache)


def test_nothing_is_allocated_and_experts_count() -> None:
    config = AutoConfig.for_model("mixtral", num_hidden_layers=4)  # 6 billion parameters
    size = model_size(config, torch.bfloat16)
    assert 6.0e9 < size.parameters < 6.2e9
    assert size.token_bytes == 2 * 4 * 8 * 128 * 2
    assert size.unfused


def test_a_vision_tower_whose_first_weights_are_numbers_is_counted() -> None:
    """SigLIP's are drawn by values that nothing fake has; the tower is frozen."""
    from transformers import Gemma3Config

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "image_size": 28}
    config = Gemma3Config(text_config=sizes, vision_config=vision | {"num_attention_heads": 2})
    size = model_size(config, torch.bfloat16)
    assert 0 < size.trained < size.parameters


def test_an_adapter_counts_its_own_weights() -> None:
    peft = pytest.importorskip("peft")
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=100)
    config.num_attention_heads = config.num_key_value_heads = 4
    config.head_dim = 16
    size = model_size(config, torch.float32, LoraConfig(rank=4))
    from transformers import LlamaForCausalLM

    from ludus.training import add_adapter

    adapted = add_adapter(LlamaForCausalLM(config), LoraConfig(rank=4), "tiny", seed=0)
    assert isinstance(adapted, peft.PeftModel)
    assert size.adapter == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert size.parameters == sum(p.numel() for n, p in adapted.named_parameters() if "lora_" not in n)


def test_what_does_not_fit_does_with_an_adapter() -> None:
    config = config_of("Qwen2.5-1.5B")
    plans = list(plans_for(config, torch.bfloat16, None, Load(), 4096, 24 * GIB))
    assert [plan.change for plan in plans] == [
        "model.lora = { rank = 16 }",
        'optimizer.name = "adamw_8bit"',
    ]
    assert plans[0].memory.peak < 24 * GIB
    assert next(plans_for(config, torch.bfloat16, None, Load(), 4096, 80 * GIB)).change == ""
    assert not list(plans_for(config, torch.bfloat16, None, Load(), 4096, 3 * GIB))


def saved(folder: Path, **changes: Any) -> Path:
    """A folder with a config.json and nothing else."""
    folder.mkdir()
    config = config_of("Qwen3-0.6B")
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    return folder


def test_a_run_is_warned_before_its_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model")
    recipe = Recipe.parse({"model": {"name": str(folder)}}, "test")
    assert memory_note(recipe) is None or "GiB" in str(memory_note(recipe))
    monkeypatch.setattr(fitting, "all_memory", lambda _: 400 * GIB)
    assert memory_note(recipe) is None
    monkeypatch.setattr(fitting, "all_memory", lambda _: 8 * GIB)
    note = memory_note(recipe)
    assert note is not None
    assert note.startswith("rl: ")
    assert "GiB to be trained" in note
    assert "ludus check model" in note


def test_the_command_says_what_it_found(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    done = CliRunner().invoke(app, ["check", "model", str(folder), "--memory", "24", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["taken"] and told["fused"] and told["family"] == "qwen3"
    assert told["size"]["parameters"] == 596049920
    assert [(one["device"], one["fits"]) for one in told["devices"]] == [("24 GiB", True)]
    done = CliRunner().invoke(app, ["check", "model", str(folder), "--memory", "6"])
    assert done.exit_code == 1
    assert "6 GiB: does not fit" in done.output


def test_a_family_that_is_refused_is_an_error(tmp_path: Path) -> None:
    AutoConfig.for_model("deepseek_v32").save_pretrained(tmp_path / "refused")
    done = CliRunner().invoke(app, ["check", "model", str(tmp_path / "refused")])
    assert done.exit_code == 1
    assert "deepseek_v32 is refused: " in done.output
    done = CliRunner().invoke(app, ["check", "model", str(tmp_path / "nothing")])
    assert done.exit_code != 0


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("hidden_size", "many", "is damaged: .*hidden_size"),
        ("hidden_size", None, "is damaged: .*hidden_size"),
        ("num_hidden_layers", -3, "is damaged: "),
        ("num_hidden_layers", 10**9, "is damaged: num_hidden_layers = 1000000000"),
        ("hidden_size", 10**12, "is damaged: hidden_size"),
        ("vocab_size", 0, "is damaged: vocab_size = 0"),
        ("num_key_value_heads", 7, "cannot be built: RuntimeError: Number of heads"),
    ],
)
def test_a_damaged_configuration_is_one_sentence(
    tmp_path: Path, key: str, value: Any, told: str
) -> None:
    folder = saved(tmp_path / "model")
    file = folder / "config.json"
    written = json.loads(file.read_text())
    written.pop("layer_types", None)
    file.write_text(json.dumps(written | {key: value}))
    done = CliRunner().invoke(app, ["check", "model", str(folder), "--memory", "24"])
    said = " ".join(f"{done.output} {done.exception}".split())
    assert done.exit_code != 0 and re.search(told, said), said
    if "damaged" in told:
        with pytest.raises(ConfigError, match="damaged"):
            load_model(ModelConfig(name=str(folder)), seed=0)


def test_sizes_that_the_file_does_not_name_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "qwen3"}')
    done = CliRunner().invoke(app, ["check", "model", str(tmp_path / "bare"), "--memory", "80"])
    assert "sizes are the defaults of Qwen3Config" in " ".join(done.output.split())
    done = CliRunner().invoke(app, ["check", "model", str(saved(tmp_path / "whole")), "--memory", "80"])
    assert "defaults of" not in done.output


def test_shorter_rows_are_an_answer_where_an_adapter_alone_is_none() -> None:
    config = config_of("Qwen3-14B")
    (plan,) = plans_for(config, torch.bfloat16, None, Load(), 32768, 40 * GIB)
    assert plan.change == "model.lora = { rank = 16 } and budgets.max_tokens = 8192"
    assert plan.longest == plan.load.tokens == 8192
    assert (
        next(plans_for(config, torch.bfloat16, LoraConfig(rank=16), Load(), 8192, 40 * GIB)).change == ""
    )


def test_a_model_that_runs_row_by_row_is_sized_as_well(tmp_path: Path) -> None:
    shape = {"n_embd": 128, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "vocab_size": 512}
    AutoConfig.for_model("gptj", **shape).save_pretrained(tmp_path / "gptj")
    done = CliRunner().invoke(
        app, ["check", "model", str(tmp_path / "gptj"), "--memory", "24", "--json"]
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["devices"][0]["fits"] and told["step"]["activations"] > 0


@pytest.fixture
def benchmark() -> ModuleType:
    path = ROOT / "benchmarks" / "memory_estimate.py"
    spec = importlib.util.spec_from_file_location("memory_estimate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["memory_estimate"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_peaks_of_real_steps_are_met_within_15_percent(benchmark: ModuleType) -> None:
    for case in benchmark.CASES:
        assert benchmark.estimated(case) == pytest.approx(benchmark.measured(case), rel=0.15), case.name
