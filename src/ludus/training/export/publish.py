"""What goes with an exported model to others: its card, a GGUF file, a repository on the hub."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError, LudusError
from ludus.core.messages import ToolSpec
from ludus.observe import ReportTable, markdown_text
from ludus.training.config.recipe import Recipe

_SHOWN = {"seed", "model", "budgets", "sampling", "warm_start", "rl", "stage"}
"""Tables of the recipe on the card: tools, servers and judges may name what is private."""


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card says."""

    name: str
    recipe: Recipe
    step: int
    base: str | None
    """The model that training began with; None for one made from scratch."""
    is_adapter: bool
    held_out: ReportTable
    tools: Sequence[ToolSpec]
    format: str
    """The action format."""
    compared: str
    notes: Sequence[str]
    stops: Sequence[str]


def model_card(facts: CardFacts) -> str:
    """The card as Markdown, with the header that the hub reads."""
    base = "made from scratch" if facts.base is None else f"trained from `{_shown(facts.base)}`"
    kind = "A LoRA adapter" if facts.is_adapter else "A model"
    parts = [
        _header(facts),
        f"# {markdown_text(facts.name)}\n",
        f"{kind} {base} as an agent with tools, by reinforcement learning with Ludus: step {facts.step} of "
        f"the recipe `{markdown_text(facts.recipe.name)}`.\n",
        "![success and reward over the steps](curve.png)\n",
    ]
    if facts.held_out.rows:
        parts += ["## Held-out tasks\n", facts.held_out.markdown()]
    if facts.notes:
        parts += ["## Before you use it\n", *(f"- {markdown_text(note)}" for note in facts.notes), ""]
    parts += [
        _tools(facts),
        _loading(facts),
        "## How it was trained\n",
        f"```json\n{_recipe(facts.recipe)}\n```\n",
    ]
    return "\n".join(parts)


def _header(facts: CardFacts) -> str:
    about: dict[str, Any] = {
        "library_name": "peft" if facts.is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["ludus", "reinforcement-learning", "agent", "tool-calling"],
    }
    if facts.base is not None and not _is_local(facts.base):
        about["base_model"] = facts.base
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in about.items()), "---"])


def _is_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(".gguf") or Path(name).exists()


def _shown(name: str) -> str:
    """A model's name; of a folder or file of this machine, its last part."""
    return Path(name).name if _is_local(name) else name


def _tools(facts: CardFacts) -> str:
    if not facts.tools:
        return "## Tools\n\nNone are written into the chat template: give `tools` with a request.\n"
    rows = [[spec.name, " ".join(spec.description.split())] for spec in facts.tools]
    listed = ReportTable(("tool", "what it does"), rows).markdown()
    return (
        "## Tools\n\nThe chat template lists the tools that the model was trained with, as they were listed in "
        "training, also where a request gives none; `tools=[]` leaves them out. Calls are written in the "
        f"format `{facts.format}`.\n\n{listed}\n"
        f"Prompts that came out as in recorded episodes, token for token: {facts.compared}.\n"
    )


def _loading(facts: CardFacts) -> str:
    how = (
        "peft import AutoPeftModelForCausalLM as Auto"
        if facts.is_adapter
        else "transformers import AutoModelForCausalLM as Auto"
    )
    stops = (
        f'    stop={json.dumps(list(facts.stops))}, extra_body={{"include_stop_str_in_output": True}},\n'
        if facts.stops
        else ""
    )
    return f'''## How to load it

```python
from {how}
from transformers import AutoTokenizer

model, tokenizer = Auto.from_pretrained("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")
messages = [{{"role": "user", "content": "..."}}]
prompt = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
made = model.generate(**prompt)
print(tokenizer.decode(made[0, prompt["input_ids"].shape[1]:]))
```

```bash
ludus serve vllm FOLDER      # or vllm serve FOLDER, with the flags that this command prints
```

```python
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
reply = client.chat.completions.create(
    model="{facts.name}", messages=[{{"role": "user", "content": "..."}}], tools=[...],
{stops})
```
'''


def _recipe(recipe: Recipe) -> str:
    """What the recipe sets, with the names of files and no folders."""
    told = recipe.model_dump(mode="json", exclude_defaults=True, include=_SHOWN)
    return json.dumps(_bare(told), indent=1)


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bare(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_bare(one) for one in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


# GGUF, by llama.cpp's own converter.

CONVERTER = "convert_hf_to_gguf.py"
_VARIABLE = "LLAMA_CPP"
_TAIL = 800


def gguf_converter() -> str:
    """llama.cpp's converter: in the folder that LLAMA_CPP names, or in PATH."""
    folder = os.environ.get(_VARIABLE)
    found = shutil.which(CONVERTER) if folder is None else str(Path(folder).expanduser() / CONVERTER)
    if found is None or not Path(found).is_file():
        raise ConfigError(
            f"--gguf needs llama.cpp's {CONVERTER}, which is not in {folder or 'PATH'}: clone "
            "https://github.com/ggml-org/llama.cpp, pip install gguf sentencepiece, and set "
            f"{_VARIABLE} to the clone's folder"
        )
    return found


def write_gguf(folder: Path, name: str, converter: str) -> Path:
    """Write an exported model as a GGUF file beside its other files."""
    target = folder / f"{name}.gguf"
    command = [sys.executable, converter, str(folder), "--outfile", str(target), "--outtype", "auto"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode or not target.is_file():
        target.unlink(missing_ok=True)
        raise LudusError(
            f"{converter} could not convert {folder}, whose other files are whole: "
            f"{done.stderr.strip()[-_TAIL:]}"
        )
    return target


# The hub.


class Hub:
    """A repository on the Hugging Face hub, or on the one that HF_ENDPOINT names."""

    def __init__(self, name: str) -> None:
        from huggingface_hub import HfApi, constants

        self.name, self.endpoint = name, constants.ENDPOINT
        self._api: Any = HfApi(endpoint=self.endpoint)

    def check(self) -> None:
        """Refuse a hub that is not reached or not logged in to, before minutes of work."""
        self._ask("whoami")

    def push(self, folder: Path, *, private: bool) -> str:
        """Upload a folder, and give its address. Files that are there and not in the folder stay."""
        self._ask("create_repo", repo_id=self.name, private=private, exist_ok=True)
        self._ask(
            "upload_folder",
            repo_id=self.name,
            folder_path=folder,
            commit_message="Upload by ludus export",
        )
        return f"{self.endpoint}/{self.name}"

    def _ask(self, what: str, **how: Any) -> None:
        from huggingface_hub.errors import LocalTokenNotFoundError

        try:
            getattr(self._api, what)(**how)
        except LocalTokenNotFoundError:
            raise ConfigError(f"--push {self.name}: log in first (hf auth login, or HF_TOKEN)") from None
        except Exception as error:  # of the client's own, of its HTTP library, of a disk
            raise LudusError(
                f"--push {self.name}: {self.endpoint} refuses {what} ({type(error).__name__}: "
                f"{str(error).strip():.300}); an exported folder is whole"
            ) from error
