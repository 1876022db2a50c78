"""The plan of a mixture of experts: tokens that travel, or weights that are gathered."""

import json
import re
from pathlib import Path

from llm.parallel.dims import ParallelDims
from llm.tools.plan.estimate import Estimate, can_divide_experts, estimate, search
from llm.tools.plan.job import Job
from llm.tools.plan.options import PlanOptions
from llm.tools.plan.plan import main

ROOT = Path(__file__).parents[2]

MIXTURE = {
    "block_size": 64,
    "per_device_train_batch_size": 2,
    "device": "cpu",
    "model_type": "qwen3_moe",
    "gpus_per_node": 4,
    "config_overrides": "vocab_size=512,num_hidden_layers=2,hidden_size=64,num_attention_heads=4,"
    "num_key_value_heads=2,head_dim=16,num_experts=8,num_experts_per_tok=2,"
    "moe_intermediate_size=32",
}
DEEPSEEK = (
    "vocab_size=512,num_hidden_layers=3,hidden_size=64,num_attention_heads=4,n_routed_experts=8,"
    "num_experts_per_tok=2,moe_intermediate_size=32,intermediate_size=64,head_dim=16,q_lora_rank=16,"
    "kv_lora_rank=16,qk_nope_head_dim=16,qk_rope_head_dim=16,v_head_dim=16,n_group=1,topk_group=1"
)
EXPERTS = {"data_parallel_shard_size": 4, "expert_parallel_size": 4}


def plan_of(**options) -> Estimate:
    job = Job(PlanOptions(**options))
    return estimate(job, job.dims)


def test_divided_experts_send_tokens_and_not_their_weights():
    """Of 128 tokens of width 64, each at 2 experts; the fullest rank has 1.5 times the mean."""
    weights, tokens, again = (
        {t.axis: t for t in plan_of(**MIXTURE, **options).transfers}
        for options in (
            {"data_parallel_shard_size": 4},
            EXPERTS,
            {**EXPERTS, "activation_checkpointing": "full"},
        )
    )
    rows = 2 * 64 * 2 * 1.5
    # To the experts and back, forward and backward, in 2 layers; a fourth stays on the rank.
    assert tokens["expert"].in_node == 2 * 4 * rows * 64 * 4 * 3 / 4
    assert again["expert"].in_node == 2 * 6 * rows * 64 * 4 * 3 / 4
    assert "expert" not in weights
    stacks = 2 * 8 * (64 * 64 + 32 * 64)
    # Two gathers and a reduce-scatter in fp32.
    assert weights["shard"].in_node - tokens["shard"].in_node == 3 * 4 * stacks * 3 / 4


def test_the_products_of_experts_count_for_each_expert_of_a_token():
    """512 tokens with two experts more in 2 layers, forward and twice as much backward."""
    four, two = (
        plan_of(**{**MIXTURE, "config_overrides": overrides})
        for overrides in (
            MIXTURE["config_overrides"].replace("per_tok=2", "per_tok=4"),
            MIXTURE["config_overrides"],
        )
    )
    assert four.flops_per_step - two.flops_per_step == 512 * 2 * 2 * 6 * 3 * 64 * 32


def test_ranks_that_share_experts_gather_them_from_one_another():
    """Two ranks divide the experts, and two others have the other half of each part."""
    shared, divided = (
        {t.what: t for t in plan_of(**MIXTURE, **sizes).transfers}
        for sizes in ({**EXPERTS, "expert_parallel_size": 2}, EXPERTS)
    )
    stacks = 2 * 8 * (64 * 64 + 32 * 64)
    # Two gathers and a reduce-scatter in fp32 of half of the experts, of which a rank has half.
    experts = shared["weights and gradients of experts"]
    assert experts.in_node == 3 * 4 * stacks / 2 / 2
    # Half of the rows stay on their rank, and not a fourth.
    tokens = "tokens to their experts and back"
    assert shared[tokens].in_node / divided[tokens].in_node == (1 / 2) / (3 / 4)
    assert "weights and gradients of experts" not in divided


def test_replicas_divide_experts_and_hold_the_rest():
    plain, divided = (plan_of(**MIXTURE, **sizes) for sizes in ({}, {"expert_parallel_size": 2}))
    stacks = 2 * 8 * (64 * 64 + 32 * 64)
    assert plain.memory.parameters - divided.memory.parameters == stacks / 2
    sent = [{t.axis: t.in_node for t in plan.transfers} for plan in (plain, divided)]
    assert sent[0]["replicate"] - sent[1]["replicate"] == 2 * 3 / 4 * 4 * stacks / 2
    assert sent[0].keys() | {"expert"} == sent[1].keys()


def test_a_first_layer_without_experts_does_not_stand_for_the_others():
    dense_layers = {0: ",first_k_dense_replace=0", 1: ",first_k_dense_replace=1"}
    tokens = {
        num_dense: {t.axis: t for t in plan_of(**options, **EXPERTS).transfers}["expert"].in_node
        for num_dense, override in dense_layers.items()
        for options in [
            {**MIXTURE, "model_type": "deepseek_v3", "config_overrides": DEEPSEEK + override}
        ]
    }
    assert tokens[0] == 3 * tokens[1] / 2


def test_experts_on_two_nodes_send_half_of_their_rows_to_the_other_node():
    by_axis = {
        t.axis: t for t in plan_of(**{**MIXTURE, "gpus_per_node": 2}, nodes=2, **EXPERTS).transfers
    }
    assert by_axis["expert"].between_nodes == 2 * by_axis["expert"].in_node


def test_only_matrices_outside_of_experts_travel_to_owners_with_muon():
    sent = {t.what: t for t in plan_of(**MIXTURE, optimizer="muon", **EXPERTS).transfers}
    # 4 attention matrices, a router and 4 gains in a layer: a gradient in fp32, an update in bf16.
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 8 * 64 + 2 * 64 + 2 * 16
    owned = sent["whole matrices to their owners and back"]
    assert owned.in_node == 6 * 2 * layer / 4 * 3 / 4


def test_the_plan_says_whether_tokens_or_weights_take_less_time(capsys):
    """A wide model with a short sample sends weights longer than tokens; a narrow one does not."""
    words = ["--device", "h100-80gb", "--gpus_per_node", "4", "--model_type", "qwen3_moe"]
    words += ["--data_parallel_shard_size", "4", "--optimizer", "sgd", "--config_overrides"]
    sizes = "num_hidden_layers=2,num_experts=64,num_experts_per_tok=2,moe_intermediate_size=1024"
    main([*words, sizes, "--block_size", "64"])
    assert re.search(r"without it [^;]+; it is [\d.]+ times as fast", capsys.readouterr().out)
    main([*words, sizes, "--block_size", "8192", "--per_device_train_batch_size", "8"])
    assert "; without it, a step is" in capsys.readouterr().out
    main(["--model_type", "llama", "--model_size", "124M", "--data_parallel_shard_size", "4"])
    assert "expert" not in capsys.readouterr().out


def test_the_plan_says_how_many_experts_and_active_parameters_there_are(capsys):
    config = MIXTURE["config_overrides"]
    words = ["--model_type", "qwen3_moe", "--device", "cpu", "--config_overrides", config]
    words += ["--block_size", "64"]
    main(words)
    assert "\nexperts: 2 layers of 8, 2 per token; 116,096 of 189,824 param" in (
        capsys.readouterr().out
    )
    main([*words, "--json"])
    values = json.loads(capsys.readouterr().out)
    # in 2 layers, 6 of 8 experts with three matrices of 64 x 32 are not active
    assert values["parameters"] - values["active_parameters"] == 2 * 6 * 3 * 64 * 32
    assert [values[name] for name in ("expert_layers", "experts", "experts_per_token")] == [
        2,
        [8],
        2,
    ]
    main(["--model_type", "gpt2", "--model_size", "124M", "--device", "cpu", "--json"])
    assert not {"active_parameters", "experts"} & json.loads(capsys.readouterr().out).keys()


def test_less_of_the_peak_is_expected_of_a_mixture_which_nobody_measured(capsys):
    config = MIXTURE["config_overrides"]
    words = ["--model_type", "qwen3_moe", "--device", "cpu", "--config_overrides", config]
    words += ["--block_size", "64", "--num_tokens", "1e6"]
    main(words)
    expected = "node-hours, at 20% of the peak (nobody has measured a mixture of experts)\n"
    assert expected in capsys.readouterr().out
    main([*words, "--efficiency", "0.3", "--json"])
    assert json.loads(capsys.readouterr().out)["efficiency"] == 0.3
    main(["--model_type", "gpt2", "--device", "cpu", "--num_tokens", "1e6"])
    assert "node-hours, at 40% of the peak\n" in capsys.readouterr().out


def test_the_search_divides_experts_where_the_trainer_does():
    job = Job(PlanOptions(**MIXTURE, gradient_accumulation_steps=2))
    layouts = {candidate.dims for candidate in search(job)}
    assert ParallelDims(shard=4, expert=4) in layouts
    assert ParallelDims(replicate=2, shard=2, expert=2) in layouts
    assert ParallelDims(pipeline=2, shard=2, expert=2) in layouts
    assert ParallelDims(shard=4, expert=2) in layouts
    assert ParallelDims(replicate=4, expert=2) in layouts
    assert not any(lay.expert > 1 and lay.tensor * lay.context > 1 for lay in layouts)
    assert not can_divide_experts(
        Job(PlanOptions(model_type="gpt2", device="cpu")), ParallelDims(shard=4, expert=4)
    )


def test_the_plan_of_the_recipe_is_the_one_in_the_guide(capsys):
    guide = (ROOT / "docs/guides/mixtures-of-experts.md").read_text(encoding="utf-8")
    shown = guide.partition("--device h100-80gb\n```\n\n```\n")[2].partition("\n```")[0]
    words = [str(ROOT / "examples/moe-1b/train.toml"), "--gpus_per_node", "8"]
    config = str(ROOT / "examples/moe-1b/config.json")
    assert main([*words, "--device", "h100-80gb", "--config_name", config]) == 0
    printed = capsys.readouterr().out.replace(f"{ROOT}/", "").splitlines()
    lines = [line for line in shown.splitlines() if line != "..."]
    assert len(lines) == 4
    assert [line for line in lines if line not in printed] == []
