"""From a name to a model and a tokenizer, and from a prompt to token ids with one BOS."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trimtab.errors import InputError
from trimtab.policy.loading import (
    Lora,
    Policy,
    as_policy,
    encode_prompt,
    load_policy,
    load_tokenizer,
    longest_sequence,
    resolve_model,
    uses_chat_template,
)
from trimtab.policy.sampler import LocalSampler, SamplingParams
from trimtab.policy.scorer import Scorer

Tiny = Callable[..., Any]
WORDS = ["<pad>", "<s>", "</s>", "<unk>", "a", "b", "c", "user", "assistant", "<end>"]
PAD, BOS, EOS, UNKNOWN, A, B, C, USER, ASSISTANT, END = range(10)
CHAT = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
)


def tokenizer(*, adds_bos: bool = False, chat: str | None = None, bos: str | None = "<s>", pad: bool = True) -> Any:
    """One token a word, in memory."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    special = {"bos_token": bos, "eos_token": "</s>", "unk_token": "<unk>"} | ({"pad_token": "<pad>"} if pad else {})
    made = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    made.chat_template = chat
    return made


@pytest.fixture
def folder(tmp_path: Path, tiny: Tiny) -> Path:
    """A complete local model."""
    tiny("llama").save_pretrained(tmp_path / "model")
    tokenizer(adds_bos=True).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# Names


def refused(name: str | Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        resolve_model(str(name), **options)
    return str(caught.value)


def test_a_complete_folder_and_a_hub_id_are_taken_as_they_are(folder: Path) -> None:
    assert resolve_model(str(folder)) == str(folder)
    assert resolve_model("owner/name") == "owner/name"


def test_a_tilde_stands_for_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model("~/model") == str(folder)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/nowhere-at-all", "too/many/parts"])
def test_a_path_that_does_not_exist_is_not_mistaken_for_a_hub_id(name: str) -> None:
    assert refused(name).startswith(f"model.name: there is no folder {name}")


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in refused(folder)


def test_a_folder_without_a_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "holds no config.json; save the model" in refused(folder)


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "holds no tokenizer" in refused(folder)


def test_a_folder_with_a_gguf_file_alone_is_told_of_its_key(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    assert "holds no config.json; name the GGUF file in model.gguf_file" in refused(tmp_path)
    assert resolve_model(str(tmp_path), "weights.gguf") == str(tmp_path)
    assert "holds no file 'other.gguf'; it holds weights.gguf" in refused(tmp_path, gguf_file="other.gguf")


def test_a_folder_of_adapters_needs_no_config_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == str(tmp_path)


def test_builtin_models_are_found_in_the_package_and_an_unknown_one_is_told_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("small", "large"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "config.json").touch()
    (tmp_path / "data" / "no-model").mkdir()
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    assert resolve_model("builtin:small") == str(tmp_path / "data" / "small")
    for name in ("builtin:smal", "builtin:", "builtin:../data/small", "builtin:no-model"):
        assert refused(name) == f"model.name: there is no built-in model '{name}'; there are large, small"


def test_a_package_without_builtin_models_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    assert refused("builtin:small").endswith("there are none")


# Loading


@pytest.mark.parametrize("load", [load_tokenizer, load_policy])
def test_an_input_error_reaches_the_user_once(load: Callable[[str], Any]) -> None:
    with pytest.raises(InputError) as caught:
        load("./nowhere")
    assert str(caught.value).count("model.name") == 1 and "cannot be loaded" not in str(caught.value)


def tear(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:3000])


def shrink(file: Path) -> None:
    file.write_text(file.read_text().replace('"hidden_size": 32', '"hidden_size": 16'))


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("model.safetensors", tear),
        ("config.json", shrink),
        ("config.json", lambda file: file.write_text("{")),
        ("config.json", lambda file: file.write_text('{"model_type": "unheard-of"}')),
        ("tokenizer.json", lambda file: file.write_text("{")),
    ],
    ids=["torn weights", "weights of another shape", "no JSON", "unknown architecture", "broken tokenizer"],
)
def test_a_damaged_folder_is_one_sentence_that_names_it(file: str, harm: Callable[[Path], Any], folder: Path) -> None:
    harm(folder / file)
    with pytest.raises(InputError, match=r"^model\.name: the (model|tokenizer) of .* cannot be loaded \(") as caught:
        load_policy(str(folder))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value) and "offline" not in str(caught.value)


def test_loading_leaves_the_progress_bars_as_they_were(folder: Path) -> None:
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.is_progress_bar_enabled()
    try:
        for enabled in (True, False):
            (transformers_logging.enable_progress_bar if enabled else transformers_logging.disable_progress_bar)()
            load_policy(str(folder))
            assert transformers_logging.is_progress_bar_enabled() == enabled
    finally:
        (transformers_logging.enable_progress_bar if before else transformers_logging.disable_progress_bar)()


def test_a_policy_loads_as_it_was_saved_and_its_own_checkpoint_replaces_it(folder: Path, tmp_path: Path) -> None:
    policy = load_policy(str(folder))
    assert policy.device == torch.device("cpu")
    assert policy.end_ids == (1, 2) and policy.pad_id == PAD
    assert policy.tokenizer("a").input_ids == [BOS, A]
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1.0)
    policy.model.save_pretrained(tmp_path / "step_1")  # type: ignore[operator]
    again = load_policy(str(folder), checkpoint=tmp_path / "step_1")
    untouched = load_policy(str(folder))
    for name, value in policy.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)
        assert torch.equal(untouched.model.state_dict()[name] + 1.0, value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_take_the_dtype_that_is_asked_for(dtype: str, folder: Path) -> None:
    model = load_policy(str(folder), dtype=dtype).model
    assert {str(p.dtype) for p in model.parameters()} == {f"torch.{dtype}"}


def test_a_tokenizer_at_hand_is_not_loaded_again(folder: Path) -> None:
    mine = tokenizer()
    assert load_policy(str(folder), tokenizer=mine).tokenizer is mine


def test_gradient_checkpointing_is_on_when_asked_for(folder: Path) -> None:
    for asked in (True, False):
        policy = load_policy(str(folder), gradient_checkpointing=asked)
        assert Scorer(policy.model).shared is not asked


def test_quantised_weights_without_adapters_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"^model\.quantization: .*add model\.lora"):
        load_policy(str(folder), quantization="4bit")


def test_adapters_start_as_no_change_and_are_all_that_trains(folder: Path) -> None:
    policy = load_policy(str(folder), lora=Lora(rank=3, alpha=6.0))
    trained = {name: p.shape for name, p in policy.model.named_parameters() if p.requires_grad}
    # Seven linear layers in each of two blocks, two factors each; not the head.
    assert len(trained) == 2 * 7 * 2 and all("lora_" in name for name in trained)
    assert {shape[0] if "lora_A" in name else shape[1] for name, shape in trained.items()} == {3}
    ids_NT = torch.tensor([[1, 5, 6]])
    plain = load_policy(str(folder)).model
    assert torch.equal(policy.model(input_ids=ids_NT).logits, plain(input_ids=ids_NT).logits)


def test_target_modules_narrow_the_adapters(folder: Path) -> None:
    policy = load_policy(str(folder), lora=Lora(rank=2, target_modules=["q_proj", "v_proj"]))
    trained = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2 and all("q_proj" in name or "v_proj" in name for name in trained)


def test_an_adapter_checkpoint_comes_back_trainable_on_top_of_the_named_model(folder: Path, tmp_path: Path) -> None:
    policy = load_policy(str(folder), lora=Lora(rank=2))
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    policy.model.save_pretrained(tmp_path / "step_1")  # type: ignore[operator]
    assert not (tmp_path / "step_1" / "model.safetensors").exists()
    again = load_policy(str(folder), lora=Lora(rank=2), checkpoint=tmp_path / "step_1")
    ids_NT = torch.tensor([[1, 5, 6]])
    assert torch.equal(again.model(input_ids=ids_NT).logits, policy.model(input_ids=ids_NT).logits)
    trained = [name for name, p in again.model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    params = SamplingParams(max_tokens=6)
    samples = [
        LocalSampler(p.model, end_ids=p.end_ids, pad_id=p.pad_id).sample([[5, 6]], 4, params, 0)
        for p in (policy, again)
    ]
    assert samples[0].completion_lists() == samples[1].completion_lists()


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_a_folder_of_adapters_stands_for_its_base_model_changed_by_them(
    lora: Lora | None, folder: Path, tmp_path: Path
) -> None:
    policy = load_policy(str(folder), lora=Lora(rank=2))
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    policy.model.save_pretrained(tmp_path / "adapters")  # type: ignore[operator]
    policy.tokenizer.save_pretrained(tmp_path / "adapters")
    again = load_policy(str(tmp_path / "adapters"), lora=lora)
    ids_NT = torch.tensor([[1, 5, 6]])
    logits_NTV = policy.model(input_ids=ids_NT).logits
    torch.testing.assert_close(again.model(input_ids=ids_NT).logits, logits_NTV, rtol=1e-4, atol=1e-4)
    trained = {name for name, p in again.model.named_parameters() if p.requires_grad}
    if lora:
        assert len(trained) == 2 * 7 * 2 and all("lora_" in name for name in trained)
        return
    assert trained == {name for name, _ in load_policy(str(folder)).model.named_parameters()}
    again.model.save_pretrained(tmp_path / "whole")  # type: ignore[operator]
    whole = load_policy(str(folder), checkpoint=tmp_path / "whole")
    torch.testing.assert_close(whole.model(input_ids=ids_NT).logits, logits_NTV, rtol=1e-4, atol=1e-4)


def test_the_longest_sequence_is_read_without_loading_and_unknown_for_a_hub_id(folder: Path) -> None:
    assert longest_sequence(str(folder)) == 128
    assert longest_sequence("owner/name") is None


# End and padding tokens


def policy_of(generation_end: int | list[int] | None, own: Any) -> Policy:
    model = nn.Linear(1, 1)
    model.generation_config = SimpleNamespace(eos_token_id=generation_end)  # type: ignore[assignment]
    return as_policy(model, own)


@pytest.mark.parametrize(
    ("generation_end", "expected"),
    [(None, (EOS,)), (END, (EOS, END)), ([END, EOS], (EOS, END)), ([END, A], (EOS, A, END)), (0, (0, EOS))],
)
def test_every_end_token_of_the_generation_config_and_the_tokenizer_ends_a_completion(
    generation_end: int | list[int] | None, expected: tuple[int, ...]
) -> None:
    assert policy_of(generation_end, tokenizer()).end_ids == expected


def test_a_tokenizer_without_an_end_token_relies_on_the_generation_config() -> None:
    own = tokenizer()
    own.eos_token = None
    assert policy_of([END], own).end_ids == (END,)
    with pytest.raises(InputError, match="names an end-of-sequence token"):
        policy_of(None, own)


def test_without_a_padding_token_an_end_token_pads() -> None:
    assert policy_of([END], tokenizer()).pad_id == PAD
    assert policy_of([END], tokenizer(pad=False)).pad_id == EOS


def test_a_model_without_a_generation_config_has_the_end_token_of_its_tokenizer() -> None:
    assert as_policy(nn.Linear(1, 1), tokenizer()).end_ids == (EOS,)


# Prompts


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", [None, CHAT, "{{ bos_token }} " + CHAT])
def test_a_prompt_has_one_bos_when_the_tokenizer_or_the_template_wants_one_and_else_none(
    adds_bos: bool, template: str | None
) -> None:
    ids = encode_prompt(tokenizer(adds_bos=adds_bos, chat=template), "a b")
    body = [A, B] if template is None else [USER, A, B, ASSISTANT]
    wanted = adds_bos or (template is not None and template.startswith("{{ bos"))
    assert ids == [BOS] * wanted + body


def test_a_bos_that_the_prompt_brings_itself_is_not_doubled() -> None:
    assert encode_prompt(tokenizer(adds_bos=True), "<s> a") == [BOS, A]
    assert encode_prompt(tokenizer(adds_bos=True), "<s> <s> a") == [BOS, A]
    assert encode_prompt(tokenizer(adds_bos=False), "<s> a") == [BOS, A]


def test_a_tokenizer_that_knows_no_bos_adds_none() -> None:
    assert encode_prompt(tokenizer(bos=None), "a b") == [A, B]


def test_only_the_start_is_cleared_of_repeated_bos_tokens() -> None:
    assert encode_prompt(tokenizer(adds_bos=True), "a <s> b") == [BOS, A, BOS, B]


def test_no_end_token_is_added_to_a_prompt_that_is_to_be_continued() -> None:
    from tokenizers import processors

    closing = tokenizer()
    closing.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    assert closing("a").input_ids == [BOS, A, EOS]
    assert encode_prompt(closing, "a b") == [BOS, A, B]


def test_a_string_becomes_a_user_message_unless_the_chat_template_is_off() -> None:
    chat = tokenizer(chat=CHAT)
    assert encode_prompt(chat, "a b") == [USER, A, B, ASSISTANT]
    assert encode_prompt(chat, "a b") == encode_prompt(chat, [{"role": "user", "content": "a b"}])
    assert encode_prompt(chat, "a b", chat_template="off") == [A, B]


def test_messages_keep_their_roles_and_order() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert encode_prompt(tokenizer(chat=CHAT), messages) == [USER, A, ASSISTANT, B, USER, C, ASSISTANT]


@pytest.mark.parametrize(("chat", "setting"), [(None, "auto"), (CHAT, "off")])
def test_messages_without_a_chat_template_are_refused(chat: str | None, setting: str) -> None:
    with pytest.raises(InputError, match="give prompts as strings"):
        encode_prompt(tokenizer(chat=chat), [{"role": "user", "content": "a"}], chat_template=setting)


def test_an_empty_prompt_is_refused_unless_a_bos_stands_for_it() -> None:
    for empty in ("", "  "):
        with pytest.raises(InputError, match="a prompt is empty"):
            encode_prompt(tokenizer(), empty)
    assert encode_prompt(tokenizer(adds_bos=True), "") == [BOS]


def test_the_chat_template_is_used_when_there_is_one_and_it_is_not_off() -> None:
    assert uses_chat_template(tokenizer(chat=CHAT), "auto")
    assert not uses_chat_template(tokenizer(chat=CHAT), "off")
    assert not uses_chat_template(tokenizer(), "auto")


# GGUF


def write_gguf(model: Any, path: Path) -> None:
    """A llama as llama.cpp stores it: other names, and the rows of queries and keys in another order."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = {
        "embed_tokens": "token_embd",
        "lm_head": "output",
        "norm": "output_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    for name, tensor in model.state_dict().items():
        parts, values = name.split("."), tensor.numpy()
        if parts[-2] in heads:
            values = values.reshape(heads[parts[-2]], 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        block = f"blk.{parts[2]}." if "layers" in parts else ""
        writer.add_tensor(f"{block}{names[parts[-2]]}.weight", values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_loads_as_plain_weights_that_can_be_saved_and_come_back(tmp_path: Path, tiny: Tiny) -> None:
    model, ids_NT = tiny("llama"), torch.tensor([[5, 6, 7, 8]])
    write_gguf(model, tmp_path / "weights.gguf")

    def logits(**options: Any) -> tuple[Any, torch.Tensor]:
        policy = load_policy(str(tmp_path), gguf_file="weights.gguf", tokenizer=tokenizer(), **options)
        return policy.model, policy.model(input_ids=ids_NT).logits

    loaded, first_NTV = logits()
    torch.testing.assert_close(first_NTV, model(input_ids=ids_NT).logits)
    loaded.save_pretrained(tmp_path / "step_1")
    # The checkpoint replaces the file: its own weights are read, not those of the GGUF file again.
    write_gguf(tiny("llama", tie_word_embeddings=True), tmp_path / "weights.gguf")
    torch.testing.assert_close(logits(checkpoint=tmp_path / "step_1")[1], first_NTV)
