"""Models with experts: computation counts active experts, traffic counts all."""

from orchestrator.contract.mesh import Mesh
from orchestrator.plan.cost.step import step_time
from orchestrator.plan.cost.traffic import traffic_of
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.model.flops import flops_per_token
from tests.plan.cost.setups import fabric, setup

MIXTRAL = shape_of(
    {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
)
EIGHT_HOSTS = fabric(hosts=8)


def test_flops_are_counted_for_active_parameters() -> None:
    """46.7e9 parameters, 12.9e9 of them active (Jiang et al. 2024), minus the embedding."""
    assert 46.6e9 < MIXTRAL.parameters < 46.8e9
    active = flops_per_token(MIXTRAL, 0) / 6
    assert abs(active - (12.88e9 - 32000 * 4096)) < 0.02e9


def test_the_weights_of_all_experts_are_gathered() -> None:
    one = setup(shape=MIXTRAL, tokens=4096, mesh=Mesh(dp_shard=64), reshard=False)
    gathered = next(t for t in traffic_of(one, EIGHT_HOSTS) if t.collective == "all-gather")
    assert abs(gathered.bytes_per_step / (MIXTRAL.parameters * 2 * 63 / 64) - 1) < 1e-6


def test_a_step_takes_a_little_longer_than_with_its_active_parameters_only() -> None:
    """A step takes at least as long as that of a dense model with as many active parameters.
    Experts have few rows each, and tokens are sent to them and back."""
    mesh = Mesh(dp_shard=64)
    experts = step_time(setup(shape=MIXTRAL, tokens=4096, mesh=mesh, compile=True), EIGHT_HOSTS)
    dense = shape_of(
        {
            "model_type": "mistral",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 2 * 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": None,
        }
    )
    alike = step_time(setup(shape=dense, tokens=4096, mesh=mesh, compile=True), EIGHT_HOSTS)
    assert 1 < experts.parts["compute"] / alike.parts["compute"] < 1.5
    assert experts.parts["communication"] > alike.parts["communication"]


def test_layers_without_experts_count_as_dense() -> None:
    mixed = shape_of(
        {
            "model_type": "qwen3_moe",
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 2,
        }
    )
    assert 0 < mixed.expert_layers < mixed.num_layers
    one = setup(shape=mixed, tokens=2048, mesh=Mesh(dp_shard=8), reshard=False)
    gathered = next(t for t in traffic_of(one, EIGHT_HOSTS) if t.collective == "all-gather")
    assert abs(gathered.bytes_per_step / (mixed.parameters * 2 * 7 / 8) - 1) < 1e-6
