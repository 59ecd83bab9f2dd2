"""The small files of a merged model: configuration, tokenizer, chat template, card."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

from trimtab.errors import InputError
from trimtab.merging.config import ModelName
from trimtab.merging.plan import MergePlan
from trimtab.merging.tokenizers import load_tokenizer

# Files of the model that is not the weights', by the name or its end.
MODEL_FILES = ("*.py", "*preprocessor_config.json", "processor_config.json")
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.model", "chat_template*", "additional_chat_templates", "generation_config.json"),
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def find_chat_template(plan: MergePlan) -> str | None:
    """The template that the merge file asks for; None: the tokenizer's own.

    Raises:
        InputError: neither a name, nor a file, nor a template.
    """
    wanted = plan.config.chat_template
    if wanted is None:
        return None
    if wanted == "chatml":
        return CHATML
    if wanted == "auto":
        tokenizers = [load_tokenizer(model.folder) for model in plan.models.values()]
        own = [tokenizer.chat_template for tokenizer in tokenizers if tokenizer is not None]
        texts = [text for text in own if isinstance(text, str)]
        return Counter(texts).most_common(1)[0][0] if texts else None
    if "{" in wanted:
        return wanted
    if Path(wanted).is_file():
        return Path(wanted).read_text(encoding="utf-8")
    raise InputError(f"chat_template is {wanted!r}; it must be auto, chatml, a Jinja text or a file that holds one.")


def write_small_files(plan: MergePlan, folder: Path, chat_template: str | None) -> None:
    """Everything beside the weights; config.json last, since without it nothing takes the folder for a model."""
    tokenizer_folder = plan.vocabulary.folder if plan.vocabulary else plan.donor.folder
    _copy(plan.donor.folder, folder, MODEL_FILES)
    _copy(tokenizer_folder, folder, TOKENIZER_FILES)
    if plan.vocabulary and plan.vocabulary.tokenizer is not None:
        plan.vocabulary.tokenizer.save_pretrained(str(folder))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        about = folder / "tokenizer_config.json"
        if about.is_file():
            values = json.loads(about.read_text(encoding="utf-8"))
            if values.pop("chat_template", None) is not None:
                about.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "merge.yaml").write_text(plan.config.text, encoding="utf-8")
    (folder / "README.md").write_text(_card(plan), encoding="utf-8")
    values = _with_special_ids(plan, tokenizer_folder)
    (folder / "config.json").write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _with_special_ids(plan: MergePlan, tokenizer_folder: Path) -> dict[str, object]:
    """config.json; where the tokenizer is another model's, so are the ids of special tokens."""
    values = dict(plan.model_config)
    if isinstance(plan.config.tokenizer_source, ModelName) and (tokenizer_folder / "config.json").is_file():
        theirs = json.loads((tokenizer_folder / "config.json").read_text(encoding="utf-8"))
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        values.update({key: theirs[key] for key in ids if key in theirs and key in values})
    return values


def _copy(source: Path, folder: Path, patterns: tuple[str, ...]) -> None:
    for path in sorted({path for pattern in patterns for path in source.glob(pattern)}):
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        else:
            # What the hub's cache holds are links into it.
            shutil.copyfile(path, folder / path.name)


def _card(plan: MergePlan) -> str:
    names = list(dict.fromkeys(name.path for name in plan.models))
    listed = "".join(f"- {json.dumps(name)}\n" for name in names)
    models = "".join(f"- {name}\n" for name in plan.models)
    return (
        f"---\nbase_model:\n{listed}tags:\n- merge\n- trimtab\n---\n\n# Merged model\n\n"
        f"Merged with `{plan.config.method}` from:\n\n{models}\n```yaml\n{plan.config.text.strip()}\n```\n"
    )
