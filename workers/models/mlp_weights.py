"""The weight maps of dense MLPs, and of experts with their router and shared expert. Need no torch."""

from workers.models.decoder_weights import LayerWeights, Weights
from workers.specs.model import MlpSpec, MoeSpec
from workers.specs.weight_map import WeightEntry, WeightKind


def mlp_weights(layer: LayerWeights, spec: MlpSpec) -> Weights:
    """An MLP in the place of experts."""
    yield layer.norm("post_attention_layernorm", "mlp.norm")
    yield from _gated(layer, "mlp.", "mlp.", spec.intermediate_size)


def moe_weights(layer: LayerWeights, spec: MoeSpec) -> Weights:
    """Router, experts and shared expert."""
    names, shared = layer.names, spec.shared
    at = f"{layer.disk}{names.moe}."
    yield layer.norm("post_attention_layernorm", "mlp.norm")
    shape = (spec.num_experts, layer.dim)
    router = f"{layer.path}mlp.router.weight"
    yield WeightEntry(at + names.router, shape, router, WeightKind.ROUTER)
    if spec.router.logit_bias:
        name = at + names.router.replace("weight", "bias")
        parameter = f"{layer.path}mlp.router.bias"
        yield WeightEntry(name, shape[:1], parameter, WeightKind.BIAS)
    if spec.router.bias:
        name, parameter = f"{at}{names.router_bias}", f"{layer.path}mlp.score_bias_E"
        row = (1,) if names.router_bias_is_row else ()
        yield WeightEntry(name, (*row, spec.num_experts), parameter, WeightKind.BIAS)
    if names.stacked_experts:
        yield from _stacked_experts(layer, f"{at}experts.", spec)
    else:
        yield from _experts(layer, spec, at)
    if shared is not None:
        name = names.shared
        if names.shared_gate_up:
            yield from _joined(layer, shared.intermediate_size)
        else:
            yield from _gated(layer, f"{name}.", "mlp.shared.", shared.intermediate_size)
        if shared.gated:
            parameter = f"{layer.path}mlp.shared.gate.weight"
            yield WeightEntry(
                f"{layer.disk}{name}_gate.weight", (1, layer.dim), parameter, WeightKind.GATE
            )


def _experts(layer: LayerWeights, spec: MoeSpec, at: str) -> Weights:
    """gate, up and down of every routed expert."""
    names, width, path = layer.names, spec.intermediate_size, f"{layer.path}mlp."
    up, down = (width, layer.dim), (layer.dim, width)
    parts = (
        (names.expert_gate, up, "w13_e2ID", (0, width), names.fused_gate_up),
        (names.expert_up, up, "w13_e2ID", (width, 2 * width), names.fused_gate_up),
        (names.expert_down, down, "w2_eDI", None, names.fused_down),
    )
    for expert in range(spec.num_experts):
        for name, shape, parameter, rows, fused in parts:
            yield WeightEntry(
                at + name.format(expert),
                shape,
                path + parameter,
                WeightKind.PROJECTION if rows else WeightKind.DOWN_PROJECTION,
                rows,
                expert=expert,
                fused=at + fused,
            )


def _joined(layer: LayerWeights, width: int) -> Weights:
    """gate and up as one tensor, and down, of a shared expert."""
    at, path = f"{layer.disk}{layer.names.shared}.", f"{layer.path}mlp.shared."
    up, down = (2 * width, layer.dim), (layer.dim, width)
    name = f"{at}{layer.names.shared_gate_up}.weight"
    yield WeightEntry(name, up, f"{path}gate_up.weight", WeightKind.PROJECTION)
    name = f"{at}{layer.names.shared_down}.weight"
    yield WeightEntry(name, down, f"{path}down.weight", WeightKind.DOWN_PROJECTION)


def _stacked_experts(layer: LayerWeights, at: str, spec: MoeSpec) -> Weights:
    """One tensor for all experts. Rows of gate and up alternate; unless packed in MXFP4, columns come first."""
    path, width, four_bit = f"{layer.path}mlp.", spec.intermediate_size, layer.four_bit
    up, down = (2 * width, layer.dim), (layer.dim, width)
    weights = (
        ("gate_up_proj", up, "w13_e2ID", WeightKind.PROJECTION),
        ("down_proj", down, "w2_eDI", WeightKind.DOWN_PROJECTION),
    )
    for name, shape, parameter, kind in weights:
        for expert in range(spec.num_experts):
            entry = WeightEntry(
                at + name,
                shape if four_bit else shape[::-1],
                path + parameter,
                kind,
                expert=expert,
                stacked=spec.num_experts,
                transposed=four_bit is None,
                interleaved=name == "gate_up_proj",
                four_bit=four_bit,
            )
            yield entry
            if spec.bias:
                bias = "b13_e2I" if entry.interleaved else "b2_eD"
                yield entry._replace(
                    name=f"{at}{name}_bias",
                    shape=shape[:1],
                    parameter=path + bias,
                    kind=WeightKind.BIAS,
                    transposed=False,
                    four_bit=None,
                )


def _gated(layer: LayerWeights, name: str, parameter: str, width: int) -> Weights:
    """gate, up and down of an MLP that is not a routed expert's."""
    at, path = layer.disk + name, layer.path + parameter
    up, w13 = (width, layer.dim), f"{path}gate_up.weight"
    yield WeightEntry(f"{at}gate_proj.weight", up, w13, WeightKind.PROJECTION, (0, width))
    yield WeightEntry(f"{at}up_proj.weight", up, w13, WeightKind.PROJECTION, (width, 2 * width))
    down = (layer.dim, width)
    yield WeightEntry(
        f"{at}down_proj.weight", down, f"{path}down.weight", WeightKind.DOWN_PROJECTION
    )
