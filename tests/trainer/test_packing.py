import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import completed, train_group

from lockstep.algorithms import ALGORITHMS
from lockstep.errors import InputError
from lockstep.ops import MAX_SEQUENCES
from lockstep.trainer import Packing, count_slots, pack, pack_shards, round_to_bucket
from lockstep.trainer.shapes import BatchShape, batch_shapes, fit_shape
from lockstep.types import ALIGNMENT, SamplingParams


def sequence(token_ids, **fields):
    return completed(**{"token_ids": token_ids, "advantage": 1.0, "loss_weight": 1.0, **fields})


def hand_groups():
    first = sequence([8, 9], advantage=0.5, loss_weight=0.25, logprobs=[-1.0, -2.0], model_logprobs=[-3.0, -4.0])
    second = sequence([10], advantage=-0.5, loss_weight=0.5, logprobs=[-5.0], model_logprobs=[-6.0])
    third = sequence([3, 4, 11], logprobs=[-7.0, -8.0, -9.0], model_logprobs=[-10.0, -11.0, -12.0])
    filtered = SamplingParams(temperature=0.5, top_k=7, top_p=0.75, min_p=0.125)
    return [train_group([5, 6, 7], [first, second], filtered), train_group([1, 2], [third], SamplingParams())]


def head(tensor, n):
    """The first n values; the rest must be one repeated value, which comes last."""
    values = tensor.tolist()
    assert len(set(values[n:])) == 1
    return values[: n + 1]


def test_layout_of_two_groups():
    (b,) = pack(hand_groups(), max_tokens=64, check_parity=True)
    assert head(b.tokens_T, 8) == [5, 6, 7, 8, 1, 2, 3, 4, 0] and len(b.tokens_T) == 16
    assert head(b.positions_T, 8) == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert head(b.cu_seqlens, 6) == [0, 3, 4, 4, 6, 8, 8] and len(b.cu_seqlens) == 17
    assert head(b.prefix_start_S, 5) == [0, 0, 0, 0, 4, 0] and len(b.prefix_start_S) == 16
    assert head(b.prefix_len_S, 5) == [0, 3, 3, 0, 2, 0]
    assert b.max_len == 16
    assert head(b.logit_rows_C, 6) == [2, 3, 2, 5, 6, 7, 0] and len(b.logit_rows_C) == 16
    assert head(b.targets_C, 6) == [8, 9, 10, 3, 4, 11, 0]
    assert head(b.valid_C, 6) == [True] * 6 + [False]
    assert head(b.weight_C, 6) == [0.25, 0.25, 0.5, 1, 1, 1, 0]
    assert b.share.tolist() == [1]
    assert head(b.advantage_C, 6) == [0.5, 0.5, -0.5, 1, 1, 1, 0]
    assert head(b.old_logprob_C, 6) == [-1, -2, -5, -7, -8, -9, 0]
    assert head(b.old_model_logprob_C, 6) == [-3, -4, -6, -10, -11, -12, 0]
    assert head(b.temperature_C, 6) == [0.5, 0.5, 0.5, 1, 1, 1, 1]
    assert head(b.top_k_C, 6) == [7, 7, 7, 0, 0, 0, 0]
    assert head(b.top_p_C, 6) == [0.75, 0.75, 0.75, 1, 1, 1, 1]
    assert head(b.min_p_C, 6) == [0.125, 0.125, 0.125, 0, 0, 0, 0]
    assert head(b.sequence_C, 6) == [0, 0, 1, 2, 2, 2, 0]
    assert b.check_parity and b.truncated and b.support_C is None
    dtypes = {name: value.dtype for name, value in vars(b).items() if isinstance(value, torch.Tensor)}
    assert {n for n, d in dtypes.items() if d == torch.int32} == {
        "cu_seqlens",
        "prefix_start_S",
        "prefix_len_S",
        "top_k_C",
    }
    assert {n for n, d in dtypes.items() if d == torch.int64} == {
        "tokens_T",
        "positions_T",
        "logit_rows_C",
        "targets_C",
        "sequence_C",
    }


def test_layout_with_the_prompt_repeated():
    (b,) = pack(hand_groups()[:1], max_tokens=64, check_parity=False, share_prefix=False)
    assert head(b.tokens_T, 7) == [5, 6, 7, 8, 5, 6, 7, 0]
    assert head(b.positions_T, 7) == [0, 1, 2, 3, 0, 1, 2, 0]
    assert head(b.cu_seqlens, 3) == [0, 4, 7, 7]
    assert b.prefix_len_S.tolist() == [0] * 16
    assert head(b.logit_rows_C, 3) == [2, 3, 6, 0]


def contexts(batch):
    """(tokens that the logits of row c may depend on, target) for each completion row, found by walking the batch."""
    ends = batch.cu_seqlens.tolist()
    found = []
    for c in range(int(batch.valid_C.sum())):
        row = int(batch.logit_rows_C[c])
        s = next(i for i in range(len(ends) - 1) if ends[i] <= row < ends[i + 1])
        prefix, length = int(batch.prefix_start_S[s]), int(batch.prefix_len_S[s])
        rows = [*range(prefix, prefix + length), *range(ends[s], row + 1)]
        assert batch.positions_T[rows].tolist() == list(range(len(rows)))
        assert len(rows) <= batch.max_len
        found.append((batch.tokens_T[rows].tolist(), int(batch.targets_C[c])))
    return found


tokens = st.lists(st.integers(0, 9), min_size=1, max_size=12)
random_groups = st.lists(st.tuples(tokens, st.lists(tokens, min_size=1, max_size=5)), min_size=1, max_size=4)


@given(random_groups, st.integers(24, 80), st.sampled_from(["packed", "per_sample"]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_token_is_predicted_once_from_its_own_context(data, max_tokens, mode, share_prefix):
    groups = [train_group(prompt, [sequence(c) for c in completions], SamplingParams()) for prompt, completions in data]
    batches = pack(groups, max_tokens=max_tokens, mode=mode, check_parity=False, share_prefix=share_prefix)
    expected = [(prompt + c[:i], c[i]) for prompt, completions in data for c in completions for i in range(len(c))]
    assert [x for b in batches for x in contexts(b)] == expected
    assert all(len(b.tokens_T) <= max_tokens for b in batches)
    if mode == "per_sample":
        assert [len(b.sequences) for b in batches] == [1] * sum(len(completions) for _, completions in data)


def test_groups_fill_micro_batches_in_order_and_a_large_one_is_split():
    def group(prompt, *lengths):
        return train_group([1] * prompt, [sequence([2] * n) for n in lengths], SamplingParams())

    # Packed tokens: 10 + 9 + 9 = 28; 10 + 20 = 30; 20 + 3 * 21 = 83, in parts of 62 and 41; 5 + 6 = 11.
    groups = [group(10, 10, 10), group(10, 21), group(20, 22, 22, 22), group(5, 7)]
    batches = pack(groups, max_tokens=64, check_parity=False)
    assert [int(b.cu_seqlens[-1]) for b in batches] == [58, 62, 52]
    assert [len(b.sequences) for b in batches] == [3, 2, 2]
    assert [len(b.tokens_T) for b in batches] == [64, 64, 64]
    assert count_slots(batches) == (192, 172)
    assert count_slots([]) == (0, 0)
    for just_fits in ([group(20, 23, 23)], [group(10, 23), group(10, 23)]):
        assert [int(b.cu_seqlens[-1]) for b in pack(just_fits, max_tokens=64, check_parity=False)] == [64]


def test_groups_begin_in_what_the_micro_batch_before_has_left_where_all_then_take_fewer_rows():
    def packed(budget, *lengths, prompt=4):
        completions = [[sequence([2] * n) for _ in range(4)] for n in lengths]
        groups = [train_group([1] * prompt, of_one, SamplingParams()) for of_one in completions]
        batches = pack(groups, max_tokens=budget, check_parity=False)
        assert [s.length for b in batches for s in b.sequences] == [n for n in lengths for _ in range(4)]
        return [(int(b.cu_seqlens[-1]), len(b.tokens_T)) for b in batches]

    # Of 4 + 4 * 20 tokens each, in parts of 64 and 24, padded to 192; the second begins behind the 24.
    assert packed(64, 21, 21) == [(64, 64), (48, 48), (64, 64)]
    # Whole they take 44 and 44, padded to 96. One completion of the second would fit behind the first: 58 and 34, 112.
    assert packed(64, 11, 11) == [(44, 48), (44, 48)]
    # With a prompt of 10 and completions of 7 they take 34 and 34; three of the second's behind the first: 62 and 16.
    assert packed(64, 7, 7, prompt=10) == [(62, 64), (16, 16)]


def test_a_micro_batch_has_no_more_segments_than_attention_takes():
    group = train_group([1], [sequence([2])] * MAX_SEQUENCES, SamplingParams())
    shapes = batch_shapes(1, MAX_SEQUENCES, 1, 1, max_len=2, max_tokens=64)
    batches = pack_shards([[group]], [0], Packing(64, shapes=shapes), check_parity=False)
    assert [len(batch.sequences) for batch in batches] == [MAX_SEQUENCES - 1, 1]
    assert {len(batch.prefix_len_S) for batch in batches} == {MAX_SEQUENCES}
    assert fit_shape(BatchShape(16, 16, MAX_SEQUENCES, 16), [], 64).segments == MAX_SEQUENCES


def test_a_sequence_that_does_not_fit_names_itself_and_what_would_do():
    group = train_group([1] * 20, [sequence([2] * 30, name="group 3 sample 1")], SamplingParams())
    with pytest.raises(InputError, match=r"group 3 sample 1.*max_tokens_per_micro_batch 48.*at least 49"):
        pack([group], max_tokens=48, check_parity=False)
    (batch,) = pack([group], max_tokens=49, check_parity=False)
    assert len(batch.tokens_T) == batch.max_len == 49


def test_unusable_sequences_are_refused():
    with pytest.raises(InputError, match="prompt is empty"):
        pack([train_group([], [sequence([1])], SamplingParams())], max_tokens=16, check_parity=False)
    with pytest.raises(InputError, match="completion is empty"):
        pack([train_group([1], [sequence([])], SamplingParams())], max_tokens=16, check_parity=False)
    with pytest.raises(ValueError, match="without its log-probs"):
        pack([train_group([1], [sequence([1])], SamplingParams())], max_tokens=16, check_parity=True)
    with pytest.raises(ValueError, match="1 log-probs for 2"):
        pack([train_group([1], [sequence([1, 2], logprobs=[0.0])], SamplingParams())], max_tokens=16, check_parity=True)


def test_buckets_are_few_and_waste_little():
    assert [round_to_bucket(n) for n in (0, 1, 16, 17, 128, 129, 160, 161, 4725, 9800)] == [
        16,
        16,
        16,
        32,
        128,
        160,
        160,
        192,
        5120,
        10240,
    ]
    sizes = {round_to_bucket(n) for n in range(1, 16385)}
    assert len(sizes) == 36 and all(size % 16 == 0 and round_to_bucket(size) == size for size in sizes)
    assert all(n <= round_to_bucket(n) < 1.25 * n for n in range(128, 16385))


def test_shares_are_of_the_packed_tokens_of_all_shards():
    first, second = hand_groups()  # 4 tokens each
    shards = [[first, second], [second]]
    for max_tokens, expected in ((8, [[2 / 3], [1 / 3]]), (6, [[1 / 3, 1 / 3], [1 / 3, 0]])):
        for own in (0, 1):
            found = pack_shards(shards, [own], Packing(max_tokens), check_parity=True)
            assert [batch.share.item() for batch in found] == pytest.approx(expected[own])


def test_loss_weights():
    def loss_weights(loss_type, *args):
        return ALGORITHMS[loss_type]().weights(*args)

    assert loss_weights("grpo", [2, 5], 3, 10) == pytest.approx([1 / 6, 1 / 15])
    assert loss_weights("dr_grpo", [2, 5], 3, 10) == pytest.approx([1 / 30, 1 / 30])
    assert loss_weights("dapo", [2, 5], 3, 10) == pytest.approx([1 / 7, 1 / 7])
    assert loss_weights("sft", [2, 5], 3, 10) == pytest.approx([1 / 7, 1 / 7])
    for loss_type in ("grpo", "dr_grpo", "dapo", "sft"):
        assert loss_weights(loss_type, [], 0, 10) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_and_repeated_prompts_give_the_same_bits(make_model, make_groups, score, dtype):
    model, groups = make_model(dtype), make_groups()
    (shared,) = pack(groups, max_tokens=4096, check_parity=False)
    (repeated,) = pack(groups, max_tokens=4096, check_parity=False, share_prefix=False)
    assert int(shared.cu_seqlens[-1]) < int(repeated.cu_seqlens[-1])
    n = int(shared.valid_C.sum())
    for a, b in zip(score(model, shared), score(model, repeated), strict=True):
        assert torch.equal(a[:n], b[:n])
    wrong = score(model, pack(make_groups(seed=1), max_tokens=4096, check_parity=False)[0])
    assert not torch.equal(wrong.logprob_C[:n], score(model, shared).logprob_C[:n])


def test_a_batch_that_moves_keeps_its_values_in_one_aligned_buffer():
    (batch,) = pack(hand_groups(), max_tokens=64, check_parity=True)
    moved = batch.to(torch.device("cpu"))
    tensors = {name: value for name, value in vars(moved).items() if isinstance(value, torch.Tensor)}
    assert tensors.pop("sequence_C") is batch.sequence_C and len(tensors) == 18
    for name, tensor in tensors.items():
        own = getattr(batch, name)
        assert torch.equal(tensor, own) and tensor.dtype == own.dtype and tensor.data_ptr() != own.data_ptr()
        assert tensor.data_ptr() % ALIGNMENT == 0
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1
    assert (moved.sequences, moved.max_len, moved.support_C) == (batch.sequences, batch.max_len, None)
