"""What is kept of what was not delivered, and how it decays."""

import functools

import numpy as np
import pytest

import jsparse
import scenarios
import transports
from algorithms import Row
from tiers import quick
from transports import AXIS, LEVELS, N

SIZE, GPUS = 4, 2


@functools.cache
def row(feedback, levels: bool) -> Row:
    """Top-k and an all-gather, on one level or two."""
    select, gather = jsparse.select.TopK(0.05), jsparse.allreduce.TopkAllGather()

    def one(comm, density):
        return jsparse.sparse_allreduce(comm, select=select, allreduce=gather, error_feedback=feedback)

    def two(axes, density):
        return jsparse.hitopk(*axes, density=0.05, error_feedback=feedback)

    return Row("feedback", two, gpus={SIZE: GPUS}) if levels else Row("feedback", one)


def run(feedback, levels: bool, steps: int = 5, bad: int | None = None):
    """Yields ``(acc, total, residual)``, each summed over the workers, and the residuals."""
    state, update = transports.workers(row(feedback, levels), SIZE)
    before = np.zeros(N)
    for number, gradient in enumerate(scenarios.take("ordinary", SIZE, steps)):
        if number == bad:
            gradient[0, 5] = np.nan
        updates, state = update(transports.tree(gradient), state)
        residuals = np.asarray(state.buckets[0].residual, np.float64)
        left = residuals.sum(0) if not levels else residuals.reshape(-1, GPUS, residuals.shape[1]).sum(0).ravel()[:N]
        yield before + gradient.sum(0), SIZE * transports.flat(updates, SIZE)[0].astype(np.float64), left, residuals
        before = left


@pytest.mark.parametrize("levels", quick([False, True], False))
def test_decay_keeps_a_part_of_what_is_left(levels: bool):
    feedback = jsparse.ErrorFeedback(decay=0.75)
    for acc, total, left, _ in run(feedback, levels):
        np.testing.assert_allclose(left, 0.75 * (acc - total), rtol=1e-4, atol=1e-2)
        assert np.any(left)


@pytest.mark.parametrize("levels", quick([False, True], False))
def test_low_pass_averages_what_is_left(levels: bool):
    """ScaleCom's filter: residual + beta (gradient - delivered)."""
    before = None
    for acc, total, left, _ in run(jsparse.ErrorFeedback(low_pass=0.25), levels):
        before = np.zeros_like(left) if before is None else before
        np.testing.assert_allclose(left, 0.25 * (acc - total) + 0.75 * before, rtol=1e-4, atol=1e-2)
        assert np.any(left)
        before = left


def test_a_bad_step_blends_nothing():
    *_, before, after = run(jsparse.ErrorFeedback(low_pass=0.3), False, steps=3, bad=2)
    np.testing.assert_array_equal(before[3], after[3])


def test_what_is_sent_is_subtracted_as_it_was():
    """What 8 bits round away is lost: it is in no residual."""
    with pytest.warns(UserWarning, match="subtract is 'sent': what rounding takes .* is lost"):
        sent = jsparse.ErrorFeedback(subtract="sent")
    wire = jsparse.wire.Compact(jsparse.quantize.Block8(64))
    for feedback, loses in ((sent, True), (jsparse.ErrorFeedback(), False)):
        lossy = Row(
            "sent",
            lambda comm, density, f=feedback: jsparse.topk_allgather(comm, density=0.05, wire=wire, error_feedback=f),
        )
        state, update = transports.workers(lossy, SIZE)
        (gradient,) = scenarios.take("ordinary", SIZE, 1)
        updates, state = update(transports.tree(gradient), state)
        total = SIZE * transports.flat(updates, SIZE)[0].astype(np.float64)
        residual = np.asarray(state.buckets[0].residual, np.float64)
        off = np.abs(gradient.sum(0) - residual.sum(0) - total).max()
        assert (off > 0.1) == loses
        # Nothing of what was selected is left.
        assert (np.count_nonzero((residual != 0) & (residual != gradient)) == 0) == loses


@pytest.mark.parametrize(
    ("options", "message"), [({"low_pass": 0.0}, "low_pass is 0.0"), ({"subtract": "own"}, "subtract is 'own'")]
)
def test_options_out_of_range(options, message: str):
    with pytest.raises(ValueError, match=message):
        jsparse.ErrorFeedback(**options)


@pytest.mark.parametrize(
    "make",
    [
        lambda mean: row(mean, False).make(AXIS, 0.05),
        lambda mean: row(mean, True).make(LEVELS, 0.05),
        lambda mean: jsparse.dgc(AXIS, density=0.05, error_feedback=mean),
        lambda mean: jsparse.quantized(AXIS, quantize=jsparse.quantize.Sign(), error_feedback=mean),
    ],
    ids=["top-k", "two levels", "dgc", "signs"],
)
def test_the_mean_is_for_low_rank(make):
    """Where a worker sends what is largest in its residual, what differs from the others' stays
    there, and all else waits for ever.
    """
    with pytest.warns(UserWarning, match="subtract is 'mean': .*: take 'local', the default"):
        mean = jsparse.ErrorFeedback(subtract="mean")
    with pytest.raises(ValueError, match=r"subtract is 'mean' with .*ErrorFeedback\(subtract='local'\)"):
        make(mean)
    with pytest.warns(UserWarning, match="subtract is 'mean'"):
        jsparse.powersgd(AXIS, subtract="mean")


def test_what_is_sent_is_for_what_selects():
    with pytest.warns(UserWarning, match="subtract is 'sent'"):
        sent = jsparse.ErrorFeedback(subtract="sent")
    with pytest.raises(ValueError, match=r"subtract is 'sent' with .*nothing would be fed back"):
        jsparse.quantized(AXIS, quantize=jsparse.quantize.Block8(), error_feedback=sent)
    for allreduce in (
        jsparse.allreduce.GTopk("tree"),
        jsparse.allreduce.GTopk(put_back="owner"),
        jsparse.allreduce.OkTopk(put_back="owner"),
        jsparse.allreduce.OkTopk(put_back="server"),
    ):
        with pytest.raises(ValueError, match=r"subtract is 'sent' with .*keeps sums of what others sent"):
            jsparse.sparse_allreduce(AXIS, select=jsparse.select.TopK(0.05), allreduce=allreduce, error_feedback=sent)


REDUCERS = [jsparse.allreduce.OkTopk, jsparse.allreduce.GTopk, jsparse.allreduce.CyclicTopK]


@pytest.mark.parametrize("make", quick(REDUCERS, jsparse.allreduce.GTopk))
def test_what_is_sent_loses_no_element_that_was_not_delivered(make):
    """On a lossless wire it is the default: what a global top-k cuts is kept."""
    with pytest.warns(UserWarning, match="subtract is 'sent'"):
        sent = jsparse.ErrorFeedback(subtract="sent")
    select = jsparse.select.TopK(0.05)
    both = [
        Row(
            "sent",
            lambda comm, _, f=f: jsparse.sparse_allreduce(comm, select=select, allreduce=make(), error_feedback=f),
        )
        for f in (sent, True)
    ]
    (lossy, first), (lossless, second) = (
        (transports.workers(row, SIZE)[1], transports.workers(row, SIZE)[0]) for row in both
    )
    for gradient in scenarios.take("ordinary", SIZE, 4):
        _, first = lossy(transports.tree(gradient), first)
        _, second = lossless(transports.tree(gradient), second)
        delivered = np.asarray(second.buckets[0].residual) == 0
        assert (np.asarray(first.buckets[0].residual)[~delivered] != 0).all()
    np.testing.assert_array_equal(first.buckets[0].residual, second.buckets[0].residual)


ROUNDING = [
    jsparse.allreduce.SsarSplitAllGather(),
    jsparse.allreduce.SsarRecursiveDoubling(),
    jsparse.allreduce.GTopk(),
    jsparse.allreduce.OkTopk(),
    jsparse.allreduce.DsarSplitAllGather(quantize=jsparse.quantize.Block8()),
]


@pytest.mark.parametrize("allreduce", quick(ROUNDING, ROUNDING[-1]), ids=repr)
def test_what_was_not_sent_is_kept_where_sums_are_rounded(allreduce):
    with pytest.warns(UserWarning, match="subtract is 'sent'"):
        sent = jsparse.ErrorFeedback(subtract="sent")
    select, wire = jsparse.select.TopK(0.05), jsparse.wire.Compact(jsparse.quantize.BFloat16())
    rounding = Row(
        "sent",
        lambda comm, _: jsparse.sparse_allreduce(
            comm, select=select, allreduce=allreduce, wire=wire, error_feedback=sent
        ),
    )
    state, update = transports.workers(rounding, SIZE)
    (gradient,) = scenarios.take("ordinary", SIZE, 1)
    _, state = update(transports.tree(gradient), state)
    k = max(1, round(0.05 * gradient.shape[1]))
    sent = np.abs(gradient) >= np.sort(np.abs(gradient), axis=1)[:, -k:][:, :1]
    residual = np.asarray(state.buckets[0].residual).reshape(gradient.shape)
    np.testing.assert_array_equal(residual[~sent], gradient[~sent])


def test_the_default_is_what_true_says():
    for by_name, by_default in zip(run(jsparse.ErrorFeedback(), False), run(True, False), strict=True):
        for ours, theirs in zip(by_name, by_default, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_bad_step_decays_nothing():
    *_, before, after = run(jsparse.ErrorFeedback(0.5), False, steps=3, bad=2)
    np.testing.assert_array_equal(before[3], after[3])
    assert np.isnan(after[1]).all()
