"""What two ranks compute together has the bits of one process that runs the same micro-batches."""

from __future__ import annotations

import ast
import json
import platform
import re
from pathlib import Path
from typing import Any

import pytest
from processes import on_ranks
from ranks import checked


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What `ranks.py` found on two ranks."""
    return json.loads(json.dumps(on_ranks(2, checked)[0]))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "experts", "a_critic", "offloaded"])
def test_gradients_updates_and_statistics_are_those_of_one_process(found: dict[str, Any], kind: str) -> None:
    assert found[kind] == [[], []]


def test_a_teacher_is_cut_and_its_scores_are_those_of_one_process(found: dict[str, Any]) -> None:
    *unlike, parts_are_all_of_it, cases, log = found["a_teacher"]
    assert unlike == [[], []] and parts_are_all_of_it and cases == 2  # of four, shared out
    assert "3 gathers begin a layer early" in "\n".join(log)


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp", "dapo"])
def test_steps_are_those_of_one_process(found: dict[str, Any], name: str) -> None:
    """With the divergence in the reward of tokens, and with prompts that are replaced."""
    (unlike, replaced, kl), second = found["whole_steps"][name]
    assert unlike == [] and second == [unlike, replaced, kl]
    assert replaced >= 4 if name == "dapo" else kl and not replaced


def test_experts_are_balanced_alike_on_ranks_that_check_no_parity(found: dict[str, Any]) -> None:
    assert found["balanced_experts"] == [[], []]


def test_worked_examples_are_those_that_one_rank_played(found: dict[str, Any]) -> None:
    first, second = found["worked_examples"]
    assert first == second > 0


def test_frozen_parameters_groups_and_ratios_of_sequences_are_those_of_one_process(found: dict[str, Any]) -> None:
    first, second = found["parameter_groups"]
    layer = ("attention_norm", "qkv", "q_norm", "k_norm", "o", "mlp_norm", "gate_up", "down")
    assert first == second and first[0] == [] and first[1] > 3
    assert sorted(first[2]) == sorted(f"layers.0.{name}" for name in layer)


def test_adding_in_another_order_would_be_noticed(found: dict[str, Any]) -> None:
    first, second = found["another_order_of_addition"]
    assert 0 in first and first == second  # the gradients, to begin with


@pytest.mark.parametrize("way", ["stage 2", "stage 3"])
def test_graphs_compute_what_eager_does_and_are_alike_on_all_ranks(found: dict[str, Any], way: str) -> None:
    graphs = found["graphs"][way]
    assert graphs["different"] == [[], []]
    first, second = graphs["digests"]
    assert first == second and first.keys() == {"forward_backward", "check", "optim_step", "gather_weights"}


def test_a_graph_that_gathers_weights_has_no_product_that_reads_them_early(found: dict[str, Any]) -> None:
    early = {f"lockstep.{name}.default" for name in ("norm_linear", "norm_gate_up", "linear_add")}
    gathers, reads = (found["graphs"][f"stage {stage}"]["scoring"] for stage in (3, 2))
    for targets in gathers:
        assert "lockstep.linear.default" in targets and early.isdisjoint(targets)
    for targets in reads:
        assert "lockstep.linear.default" not in targets and early <= set(targets)


def test_one_rank_traces_for_all(found: dict[str, Any]) -> None:
    for way in found["graphs"].values():
        traced, taken = way["captures"]
        assert traced >= 4 and taken == 0


def test_a_layer_has_one_gather_and_one_exchange(found: dict[str, Any]) -> None:
    log = "\n".join(found["graphs"]["stage 3"]["log"])
    assert "reshard: " in log and "16 of 18 gathered again" in log
    assert "34 -> 6 gathers, 18 -> 4 exchanges" in log
    assert "5 gathers begin a layer early, 3 exchanges end a layer late" in log


def test_weights_that_lie_whole_are_not_gathered_in_a_micro_batch(found: dict[str, Any]) -> None:
    (whole,), (gathered,) = (found["graphs"][f"stage {stage}"]["wire"] for stage in (2, 3))
    exchanges = count, size = whole["exchanges"]
    assert count == 4 and whole == {"gathers": [0, 0], "exchanges": exchanges}
    count, received = gathered["gathers"]
    assert count == 6 and gathered["exchanges"] == exchanges
    assert 1.5 * size < received < 2 * size  # each weight, and again all but the head and the last norm


def test_two_ranks_make_graphs_side_by_side(found: dict[str, Any]) -> None:
    """Those that one makes, each rank a part of them; and both find what either has stored."""
    if found["graphs_made_side_by_side"] is None:
        pytest.skip("of what the host does")
    first, second = found["graphs_made_side_by_side"]
    for (one, *alone), (both, *beside), (kept, *stored), message in (first, second):
        assert both == kept == one and len(one) > 10
        assert beside == [alone[0] or alone[1], 0, 0, True] and stored == [0, beside[0], 0, False]
        assert message == "device is 'tpu'; it must be auto, cpu or cuda (on rank 1, " + platform.node() + ")"
    assert [first[0][-1], second[0][-1]] == [True, False]  # by itself the first makes all


def test_two_ranks_name_the_kernels_of_what_each_has_made(found: dict[str, Any]) -> None:
    """Each has its own part, once, and then the kernels of both, which the second loads when the first has compiled."""
    if found["kernels_named_side_by_side"] is None:
        pytest.skip("of what the host does")
    (first, named, listed, products), (second, others, *rest) = found["kernels_named_side_by_side"]
    assert set(first) & {"optim_step()", "mixed()"} == {"optim_step()"}
    assert set(second) & {"optim_step()", "mixed()"} == {"mixed()"}
    assert set(first).isdisjoint(second) and {*named} == {*others} == {*first, *second}
    assert listed == [[]] and rest == [[[], [*others]], products] and products == [len(named)]


def test_ranks_that_ask_for_a_graph_with_other_statics_or_constants_are_refused(found: dict[str, Any]) -> None:
    """The others would have taken the first one's."""
    for same, statics, constants in found["a_graph_of_other_statics"]:
        assert same == [2.0, 2.0]
        assert statics.startswith(
            "rank 1 exchanges the graph scaled(by=4) while rank 0 exchanges the graph scaled(by=3)"
        )
        assert constants.startswith("the graph shifted(): constant shift is 2 on rank 1 and 1 on rank 0;")


def test_a_rank_that_asks_for_what_others_do_not_is_named_on_all(found: dict[str, Any]) -> None:
    told = "rank 1 exchanges the graph f() while rank 0 exchanges a value; every process must run the same program"
    assert [message.startswith(told) for message in found["ranks_apart"]] == [True, True]


def test_an_update_is_put_back_from_the_whole_weights(found: dict[str, Any]) -> None:
    for rank in found["an_update_that_is_put_back"]:
        copied = [0, 12, 0, 8, 0, 12] if len(rank) == 6 else [0, 12, 0, 12]  # no float32 on a GPU
        assert [copies for copies, _ in rank] == pytest.approx(copied, abs=0.4)
        assert all(same for _, same in rank)


def test_a_graph_that_is_wrong_on_one_rank_is_refused_on_all(found: dict[str, Any]) -> None:
    for cases, *messages in found["a_graph_that_is_wrong_on_one_rank"]:
        assert cases == 5
        for case, message in zip(("first", "tiny"), messages, strict=True):
            assert message.startswith(f"optim_step(), case '{case}': the graph differs from eager in")
            assert "on rank 1" in message and "on rank 0" not in message


def test_what_all_ranks_need_of_a_folder_is_read_once(found: dict[str, Any]) -> None:
    """And what one finds damaged stops all."""
    for whole, (read, of), small, message in found["weights_read_in_shares"]:
        assert whole and small < read < 0.6 * of
        assert "model.safetensors: model.embed_tokens.weight has values that are NaN" in message
        assert message.endswith(f"(on rank 1, {platform.node()})")


def test_a_flipped_bit_on_one_rank_stops_the_update_on_all(found: dict[str, Any]) -> None:
    first, second = found["a_flipped_bit_on_one_rank"]
    assert first == second == [False, 1, True, [["group 1 sample 0", 2, "sampled"]], True]


def test_a_loss_that_is_not_finite_on_one_rank_stops_the_update_on_all(found: dict[str, Any]) -> None:
    assert found["a_loss_that_is_not_finite_on_one_rank"] == [[False, False, True]] * 2


def test_what_is_read_of_two_gpus_is_found(found: dict[str, Any]) -> None:
    text = (Path(__file__).parents[1] / "gpu" / "test_fsdp_gpu.py").read_text()
    (kinds,) = re.findall(r'parametrize\("kind", (\[.*\])\)', text)
    read = {*ast.literal_eval(kinds), *re.findall(r'found\["(\w+)"\]', text)}
    assert len(read) > 8 and read <= found.keys()


def test_state_goes_from_two_ranks_to_one_and_back(found: dict[str, Any]) -> None:
    assert found["state_in_one_process"] == [[], []]


def test_rollouts_are_whole_where_they_are_read(found: dict[str, Any]) -> None:
    (first, all_first), (second, all_second) = found["brought_rollouts"]
    for rank, whole in ((first, 5), (second, 4)):
        assert [here for here, _ in rank].count(True) == whole
        for here, same in rank:
            assert same is True if here else "which another rank has" in same
    assert all(all_first) and all_second == [False, True] * 3


def test_a_rank_receives_once_what_the_first_makes(found: dict[str, Any]) -> None:
    for same, received in found["broadcast_serialized"]:
        assert same and 1_000_000 < received < 1_001_000


def test_what_one_rank_raises_all_raise_and_the_first_reports(found: dict[str, Any]) -> None:
    for rank, (bad, unlike, zero, value) in enumerate(found["agreement"]):
        assert bad == ["InputError", f"row 7 is bad (on rank 1, {platform.node()})", rank > 0]
        assert unlike[1].startswith("these ranks: torch is '2.1' on rank 1 and '2.0' on rank 0")
        assert zero == ["ZeroDivisionError", rank > 0]
        assert value == 0


def test_one_thread_runs_the_collectives_of_graphs(found: dict[str, Any]) -> None:
    """As two would free the name of a group's latest collective twice."""
    assert found["threads_of_graphs_collectives"] == [[1], [1]]
