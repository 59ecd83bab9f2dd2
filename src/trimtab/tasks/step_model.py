"""A token-classification model as a step scorer: a process reward model that transformers loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import InputError
from trimtab.tasks.prompts import messages_to_text

if TYPE_CHECKING:
    import torch

POSITIVE = "positive"


class TokenClassificationScorer:
    """The probability that a step is right: of the positive label, at the separator behind the step.

    The model reads the prompt, then each step with a separator behind it, encoded piece by piece and put together, with
    one BOS in front when the tokenizer has one: the layout in which TRL's process reward trainer makes its training
    rows. The positive label is the one called `positive`, or number 1.
    """

    def __init__(
        self,
        name: str,
        *,
        separator: str = "\n",
        batch_tokens: int = 16384,
        device: torch.device | str = "cpu",
    ) -> None:
        """Load model and tokenizer.

        Args:
            name: a local folder.
            separator: as in the model's training.
            batch_tokens: padded tokens that run at once.
            device: where the model runs.

        Raises:
            InputError: the folder holds no such model, its head has no weights, or the separator is no token.
        """
        from transformers import AutoModelForTokenClassification, AutoTokenizer

        folder = str(Path(name).expanduser())
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model, report = AutoModelForTokenClassification.from_pretrained(
                folder, local_files_only=True, output_loading_info=True
            )
        except Exception as error:  # transformers and safetensors raise kinds of their own
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"the step scorer {name!r} is no token-classification model ({reason}).") from error
        if report["missing_keys"]:
            # transformers would fill a missing head with random numbers and go on.
            missing = ", ".join(sorted(report["missing_keys"]))
            raise InputError(
                f"the step scorer {name!r} lacks weights ({missing}); give a folder that a token-classification model "
                "was saved to."
            )
        self.separator_ids: list[int] = self.tokenizer(separator, add_special_tokens=False).input_ids
        if not self.separator_ids:
            raise InputError(f"the step scorer {name!r}: its tokenizer has no token for the separator {separator!r}.")
        labels = {label.lower(): number for label, number in model.config.label2id.items()}
        self.positive: int = labels.get(POSITIVE, 1)
        if not self.positive < model.config.num_labels or model.config.num_labels < 2:
            raise InputError(f"the step scorer {name!r} has one label; it needs one for right and one for wrong steps.")
        self.model = model.to(device).eval()
        self.batch_tokens = batch_tokens

    def __call__(self, prompts: Sequence[Any], steps: Sequence[Sequence[str]], **_: Any) -> list[list[float | None]]:
        """A probability from 0 to 1 a step, without gradient.

        Raises:
            ValueError: a row has more tokens than the model has positions.
        """
        encoded = [self._encode(prompt, row) for prompt, row in zip(prompts, steps, strict=True)]
        scores: list[list[float | None]] = [[] for _ in steps]
        limit = getattr(self.model.config, "max_position_embeddings", None)
        by_length = sorted((row for row in range(len(steps)) if steps[row]), key=lambda row: len(encoded[row][0]))
        if limit is not None and by_length and len(encoded[by_length[-1]][0]) > limit:
            longest = len(encoded[by_length[-1]][0])
            raise ValueError(f"prompt and steps have {longest} tokens, more than the step scorer's {limit} positions")
        while by_length:
            count = min(len(by_length), max(1, self.batch_tokens // len(encoded[by_length[-1]][0])))
            batch, by_length = by_length[-count:], by_length[:-count]
            for row, values in zip(batch, self._probabilities([encoded[row] for row in batch]), strict=True):
                scores[row] = [*values]
        return scores

    def _encode(self, prompt: Any, steps: Sequence[str]) -> tuple[list[int], list[int]]:
        """Token ids, and the position of the last token of each step's separator."""
        text = prompt if isinstance(prompt, str) else messages_to_text(prompt)
        bos = self.tokenizer.bos_token_id
        ids: list[int] = [] if bos is None else [bos]
        ids += self.tokenizer(text, add_special_tokens=False).input_ids
        ends = []
        for step in steps:
            ids += self.tokenizer(step, add_special_tokens=False).input_ids + self.separator_ids
            ends.append(len(ids) - 1)
        return ids, ends

    def _probabilities(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        import torch

        width = max(len(ids) for ids, _ in rows)
        device = next(self.model.parameters()).device
        ids_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows], device=device)
        mask_BT = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows], device=device)
        with torch.inference_mode():
            logits_BTL = self.model(input_ids=ids_BT, attention_mask=mask_BT).logits
        positive_BT = logits_BTL.float().softmax(dim=-1)[..., self.positive].cpu()
        return [positive_BT[row, ends].tolist() for row, (_, ends) in enumerate(rows)]
