import json
import shutil

import pytest
import torch
from transformers import GPT2Config, MambaConfig, Qwen3Config, RwkvConfig, T5Config

from estr.config.sections import ModelConfig
from estr.environments.calculator import CalculatorTask
from estr.errors import MissingExtraError, UsageError
from estr.models import load
from estr.models.builtin import new_model, resolve_model
from estr.models.conversation import Conversation
from estr.models.load import apply_lora, load_model, locate, merged_state, parameter_names, save_model
from estr.models.tokenizer import builtin_tokenizer

TOKENIZER = builtin_tokenizer()
IDS = torch.tensor([[6, 70, 71, 300, 12, 9]])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "micro"
    save_model(new_model("builtin:micro", TOKENIZER), TOKENIZER, directory)
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def refused(directory, **options):
    with pytest.raises(UsageError) as error:
        load_model(directory, "float32", **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_round_trip(saved):
    loaded = load_model(saved, "float32")
    assert torch.equal(logits(loaded.model), logits(new_model("builtin:micro", TOKENIZER)))
    assert loaded.model.config._attn_implementation == "estr"
    assert loaded.model.dtype is torch.float32
    assert loaded.tokenizer.encode("48 apples") == TOKENIZER.encode("48 apples")
    assert loaded.tokenizer.chat_template == TOKENIZER.chat_template


def test_bfloat16_on_disk_becomes_float32(directory):
    save_model(new_model("builtin:micro", TOKENIZER).bfloat16(), TOKENIZER, directory)
    assert {p.dtype for p in load_model(directory, "float32").model.parameters()} == {torch.float32}
    assert {p.dtype for p in load_model(directory, torch.bfloat16).model.parameters()} == {torch.bfloat16}


def test_fault_A4_generation_defaults_of_the_model_do_not_leak(directory):
    (directory / "generation_config.json").write_text(
        json.dumps(
            {"repetition_penalty": 1.05, "temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": [1, 9]}
        )
    )
    loaded = load_model(directory, "float32")
    kept = loaded.model.generation_config
    assert (kept.repetition_penalty, kept.temperature, kept.top_k, kept.do_sample) == (None, None, None, None)
    assert Conversation(loaded.tokenizer, [{"role": "user", "content": "x"}]).end_ids == {1, 9}
    save_model(loaded.model, loaded.tokenizer, directory / "again")
    assert "repetition_penalty" not in (directory / "again" / "generation_config.json").read_text()
    assert load_model(directory / "again", "float32").model.generation_config.eos_token_id == [1, 9]


def test_fault_D5_a_tied_head_is_one_parameter(saved):
    model = load_model(saved, "float32").model
    names = parameter_names(model)
    assert len(names) == len(set(names)) == 24
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    before = logits(model)
    with torch.no_grad():
        merged_state(model)["model.embed_tokens.weight"] += torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not torch.allclose(before, logits(model))


def test_fault_D3_adapters_reach_the_weights_an_engine_gets(saved):
    pytest.importorskip("peft")
    plain = load_model(saved, "float32").model
    tuned = apply_lora(load_model(saved, "float32").model, rank=2, alpha=4)
    assert parameter_names(tuned) == parameter_names(plain)
    assert all(torch.equal(value, plain.get_parameter(name)) for name, value in merged_state(tuned).items())
    layer = tuned.get_base_model().model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.add_(1.0)
    changed = merged_state(tuned)
    name = "model.layers.0.self_attn.q_proj.weight"
    delta = 2.0 * torch.ones(64, 2) @ layer.lora_A["default"].weight
    torch.testing.assert_close(changed[name], plain.get_parameter(name) + delta)
    plain.load_state_dict({**plain.state_dict(), **changed})
    assert not torch.allclose(logits(plain), logits(load_model(saved, "float32").model))
    torch.testing.assert_close(logits(plain), logits(tuned), rtol=1e-5, atol=1e-5)


def test_lora_trains_only_adapters_and_is_seeded(saved, tmp_path):
    pytest.importorskip("peft")
    one, two = (apply_lora(load_model(saved, "float32").model, rank=2, alpha=4) for _ in range(2))
    trained = {name for name, p in one.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2
    assert all(".lora_" in name for name in trained)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    save_model(one, TOKENIZER, tmp_path)
    assert torch.equal(logits(load_model(tmp_path, "float32").model), logits(load_model(saved, "float32").model))


def test_lora_needs_its_extra_and_a_rank(saved, monkeypatch):
    model = load_model(saved, "float32").model
    with pytest.raises(UsageError, match="lora_rank"):
        apply_lora(model, 0, 16)
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"estr\[peft\]"):
        apply_lora(model, 4, 16)


def test_no_directory(tmp_path):
    assert "no directory" in refused(tmp_path / "nowhere")
    assert "no directory" in refused("./nowhere")
    file = tmp_path / "model.safetensors"
    file.touch()
    assert "is a file" in refused(file)


def test_unknown_hub_name_offline(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refused("nobody/nothing-here")
    assert "nobody/nothing-here" in message
    assert "local model directory" in message


def test_unknown_builtin_names_the_nearest():
    with pytest.raises(UsageError, match="builtin:micro"):
        resolve_model(ModelConfig(path="builtin:mikro"), CalculatorTask())
    with pytest.raises(UsageError, match="no directory"):
        locate("builtin:micro")


def test_no_tokenizer(directory):
    (directory / "tokenizer.json").unlink()
    assert "no tokenizer" in refused(directory)


def test_no_config_and_adapter(directory):
    (directory / "config.json").unlink()
    assert "no config.json" in refused(directory)
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "merge it into its base model" in refused(directory)


def test_no_chat_template_falls_back_with_a_warning(directory, caplog):
    (directory / "chat_template.jinja").unlink()
    loaded = load_model(directory, "float32")
    assert "no chat template" in caplog.text
    talk = Conversation(loaded.tokenizer, [{"role": "user", "content": "4+4?"}])
    turn = loaded.tokenizer.encode(" 8<|end|>", add_special_tokens=False)
    extension = talk.extend(turn, talk.decode(turn), [{"role": "tool", "content": "ok"}])
    assert not extension.fork
    row = loaded.tokenizer.decode(talk.prompt_ids + turn + extension.tokens)
    assert row == "User: 4+4?\n\nAssistant: 8<|end|>\n\nTool: ok\n\nAssistant:"


def test_no_end_of_sequence(directory):
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "eos_token": None}))
    (directory / "generation_config.json").unlink()
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert "no turn could ever end" in refused(directory)


def test_pickled_weights_are_refused(directory):
    torch.save(new_model("builtin:micro", TOKENIZER).state_dict(), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    assert "convert them to safetensors" in refused(directory)
    (directory / "pytorch_model.bin").unlink()
    assert "no weights" in refused(directory)


def test_incomplete_or_broken_weights_are_refused(directory):
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    assert "model.norm.weight" in refused(directory)
    path.write_bytes(path.read_bytes()[:1000])
    assert "cannot be loaded" in refused(directory)


def test_remote_code_runs_only_when_it_is_allowed(directory):
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "own.py").write_text("raise SystemExit('ran')")
    assert "model.trust_remote_code = true" in refused(directory)
    with pytest.raises((SystemExit, UsageError)):
        load_model(directory, "float32", trust_remote_code=True)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=1024), "linear_attention"),
        (RwkvConfig(hidden_size=8, num_hidden_layers=1, vocab_size=1024), "recurrent state"),
        (T5Config(d_model=8, num_layers=1, vocab_size=1024), "encoder-decoder"),
        (Qwen3Config(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"]), "linear_attention"),
    ],
)
def test_architectures_without_a_plain_cache_are_refused(directory, config, word):
    config.save_pretrained(directory)
    assert word in refused(directory)


def test_a_tokenizer_larger_than_the_model_is_refused(directory):
    config = json.loads((directory / "config.json").read_text())
    small = Qwen3Config(**{**config, "vocab_size": 1000})
    model = type(new_model("builtin:micro", TOKENIZER))(small)
    model.save_pretrained(directory)
    assert "1024 ids, the model embeds only 1000" in refused(directory)


def test_other_architectures_load(tmp_path):
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=1024, n_positions=32, eos_token_id=1))
    save_model(model.eval(), TOKENIZER, tmp_path)
    torch.testing.assert_close(
        logits(load_model(tmp_path, "float32").model.eval()), logits(model), rtol=1e-5, atol=1e-5
    )


def test_a_missing_chat_template_is_told_once(directory, caplog):
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    for _ in range(3):
        load_model(directory, "float32")
    assert caplog.text.count("no chat template") == 1


def test_adapters_are_made_without_warnings(directory, recwarn):
    apply_lora(load_model(directory, "float32").model, 2, 4.0)
    assert [str(warning.message) for warning in recwarn if warning.category is FutureWarning] == []
