"""Draft models in plain torch and transformers' modules, each as one function of whole sequences, without a cache.

T tokens, D hidden.
"""

import copy
import re
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from tests.family_cases import load_reference


class DraftReference(Protocol):
    """What the K applications of a draft model need."""

    def states(self, token_ids: list[int]) -> torch.Tensor: ...
    def layer(self, token_ids: list[int], states_TD: torch.Tensor) -> torch.Tensor: ...
    def logits(self, state_D: torch.Tensor) -> torch.Tensor: ...
    def token(self, index: int) -> int: ...


@torch.inference_mode()
def draft_logits(
    reference: DraftReference, prompt: list[int], next_token: int, depth: int
) -> list[torch.Tensor]:
    """Return the logits of each depth; the token of a depth is the likeliest."""
    states_TD, tokens = reference.states(prompt), [*prompt[1:], next_token]
    found = []
    for _ in range(depth):
        out_D = reference.layer(tokens, states_TD)[-1]
        found.append(reference.logits(out_D))
        tokens.append(reference.token(int(found[-1].argmax())))
        states_TD = torch.cat((states_TD, out_D[None]))
    return found


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint."""
    return {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}


class _OfModel:
    """States and output head of transformers' model."""

    def __init__(self, folder: Path):
        self.model = load_reference(folder)
        self.decoder = self.model.get_decoder()

    def states(self, token_ids: list[int]) -> torch.Tensor:
        hidden: torch.Tensor = self.decoder(torch.tensor([token_ids])).last_hidden_state[0]
        return hidden

    def logits(self, state_D: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.lm_head(state_D)
        return logits

    def token(self, index: int) -> int:
        return index

    def embed(self, token_ids: list[int]) -> torch.Tensor:
        embedded: torch.Tensor = self.decoder.embed_tokens(torch.tensor(token_ids))
        return embedded

    def place(self, x_TD: torch.Tensor) -> dict[str, Any]:
        positions = torch.arange(len(x_TD))[None]
        rotation = self.decoder.rotary_emb(x_TD[None], position_ids=positions)
        return {
            "position_embeddings": rotation,
            "position_ids": positions,
            "attention_mask": None,
            "past_key_values": None,
        }


class TransformersMtp(_OfModel):
    """transformers' own head, of DeepSeek-V3 and GLM."""

    def __init__(self, folder: Path):
        from transformers.modeling_layers import MtpModel

        super().__init__(folder)
        number = self.model.config.num_hidden_layers
        if getattr(self.model.config, "mlp_layer_types", None) is not None:
            # of a family without these settings in transformers 5.23
            self.model.config.mtp_mlp_layer_types = ["sparse"]
            self.model.config.num_mtp_layers = 1
        self.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{number}.*"]
        (self.head,) = MtpModel.from_pretrained(self.model).float().eval().layers

    def layer(self, token_ids: list[int], states_TD: torch.Tensor) -> torch.Tensor:
        embedded_TD = self.embed(token_ids)
        out = self.head(embedded_TD[None], states_TD[None], **self.place(states_TD))
        found: torch.Tensor = out[0]
        return found


class QwenMtp(_OfModel):
    """The head of Qwen3-Next and Qwen3.5 around transformers' decoder layer."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        tensors = {
            name.removeprefix("mtp."): tensor
            for name, tensor in read_tensors(folder).items()
            if name.startswith("mtp.")
        }
        config = copy.deepcopy(self.model.config.get_text_config())
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        self.block = type(self.decoder.layers[0])(config, 0).eval()
        own = {
            name.removeprefix("layers.0."): tensor
            for name, tensor in tensors.items()
            if name.startswith("layers.0.")
        }
        self.block.load_state_dict(_fused(own))
        self.fc = tensors["fc.weight"]
        self.norms = {}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            norm = type(self.decoder.norm)(config.hidden_size, eps=config.rms_norm_eps)
            norm.load_state_dict({"weight": tensors[f"{name}.weight"]})
            self.norms[name] = norm

    def layer(self, token_ids: list[int], states_TD: torch.Tensor) -> torch.Tensor:
        embedded_TD = self.norms["pre_fc_norm_embedding"](self.embed(token_ids))
        both = torch.cat((embedded_TD, self.norms["pre_fc_norm_hidden"](states_TD)), -1)
        out = self.block(F.linear(both, self.fc)[None], **self.place(states_TD))
        found: torch.Tensor = self.norms["norm"](out[0])
        return found


def _fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a layer's tensors with those of single experts joined as transformers has them."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        part = re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)_proj\.weight", name)
        if part is None:
            found[name] = tensor
        else:
            experts.setdefault(part[2], {})[int(part[1])] = tensor
    if experts:
        gate, up, down = (
            torch.stack([experts[name][number] for number in sorted(experts[name])])
            for name in ("gate", "up", "down")
        )
        found["mlp.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        found["mlp.experts.down_proj"] = down
    return found


class PlainEagle3(_OfModel):
    """The draft layer as EAGLE-3's paper and code have it."""

    def __init__(self, folder: Path, draft: Path, settings: dict[str, Any], aux: list[int]):
        super().__init__(folder)
        self.settings, self.aux = settings, aux
        found = read_tensors(draft).items()
        self.tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in found}
        self.tensors.setdefault("embed_tokens.weight", self.decoder.embed_tokens.weight)
        self.tensors.setdefault("lm_head.weight", self.model.lm_head.weight)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], 1e-6)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.tensors.get(f"midlayer.{name}.bias")
        return F.linear(x, self.tensors[f"midlayer.{name}.weight"], bias)

    def states(self, token_ids: list[int]) -> torch.Tensor:
        found: dict[int, torch.Tensor] = {}
        hooks = [
            self.decoder.layers[number].register_forward_hook(
                lambda _layer, _args, out, number=number: found.update({number: out[0]})
            )
            for number in self.aux
        ]
        self.decoder(torch.tensor([token_ids]))
        for hook in hooks:
            hook.remove()
        aux = [found[number] for number in self.aux]
        if self.settings.get("fc_norm"):
            aux = [self.norm(f"fc_norm.{place}", x_TD) for place, x_TD in enumerate(aux)]
        aux_TA = torch.cat(aux, -1)
        if self.settings.get("norm_before_fc"):
            aux_TA = self.norm("input_norm", aux_TA)
        return F.linear(aux_TA, self.tensors["fc.weight"])

    def layer(self, token_ids: list[int], states_TD: torch.Tensor) -> torch.Tensor:
        embedded = self.tensors["embed_tokens.weight"][torch.tensor(token_ids)]
        normed = self.norm("midlayer.hidden_norm", states_TD)
        both = torch.cat((self.norm("midlayer.input_layernorm", embedded), normed), -1)
        q, k, v = (
            self.linear(f"self_attn.{part}_proj", both).unflatten(-1, (-1, 16)).transpose(0, 1)
            for part in "qkv"
        )
        if "midlayer.self_attn.q_norm.weight" in self.tensors:
            q, k = (
                self.norm("midlayer.self_attn.q_norm", q),
                self.norm("midlayer.self_attn.k_norm", k),
            )
        attended = F.scaled_dot_product_attention(
            _rotate(q)[None], _rotate(k)[None], v[None], is_causal=True, enable_gqa=True
        )
        o = self.linear("self_attn.o_proj", attended[0].transpose(0, 1).flatten(1))
        x = o + (normed if self.settings.get("norm_before_residual") else states_TD)
        h = self.norm("midlayer.post_attention_layernorm", x)
        gate = F.silu(self.linear("mlp.gate_proj", h))
        x = x + self.linear("mlp.down_proj", gate * self.linear("mlp.up_proj", h))
        return self.norm("norm", x) if self.settings.get("norm_output") else x

    def logits(self, state_D: torch.Tensor) -> torch.Tensor:
        if not self.settings.get("norm_output"):
            state_D = self.norm("norm", state_D)
        return F.linear(state_D, self.tensors["lm_head.weight"])

    def token(self, index: int) -> int:
        return index + int(self.tensors["d2t"][index]) if "d2t" in self.tensors else index


def _rotate(x_HTd: torch.Tensor) -> torch.Tensor:
    """Rotate the values of each head, paired half a head apart, by its position."""
    half = x_HTd.shape[-1] // 2
    frequencies = 10_000.0 ** -(torch.arange(half) / half)
    angles_Td = torch.arange(x_HTd.shape[1])[:, None] * frequencies
    cos, sin = angles_Td.cos(), angles_Td.sin()
    first, second = x_HTd[..., :half], x_HTd[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
