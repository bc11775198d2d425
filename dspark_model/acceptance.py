"""Acceptance of a drafter in figures: what a set of drafted texts says, beside n-gram look-up on the same texts."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from dspark_model.generation import Generation, compare_greedy

LOOKUP_NGRAMS = (4, 3, 2, 1)
REPEAT_NGRAM = 8
NUM_BINS = 10


@dataclass(frozen=True, slots=True)
class Timing:
    """Decoding without the prefill, at `batch` texts at once.  Speeds in tokens a second; committed tokens only."""

    num_prompts: int
    batch: int
    plain: float
    drafted: float
    speed_up: float


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Drafts whose confidence lies in one of the equal parts of [0, 1]."""

    count: int
    mean_predicted: float
    mean_observed: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Confidence against acceptance, over all offered drafts.

    ece: sum over bins of (share of drafts in the bin) x |mean predicted - mean observed|.
    """

    count: int
    ece: float
    mean_predicted: float
    mean_observed: float
    bins: tuple[CalibrationBin, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A drafted text that leaves the plain greedy text at new token `index` without a tie (margin None: a length)."""

    prompt: int
    index: int
    margin: float | None


@dataclass(frozen=True, slots=True)
class Lossless:
    """Drafted against plain greedy texts.

    margin: below it two best logits count as a tie.  equal, tied: texts that are equal, and that differ from a tie on.
    unexcused: all other differences.  near_ties: tokens of the plain texts with a margin below it.
    row_faults: committed tokens that are not the arg max of the target, run again with the same rows; None if not asked.
    """

    margin: float
    equal: int
    tied: int
    unexcused: tuple[Difference, ...]
    near_ties: int
    row_faults: int | None

    @property
    def holds(self) -> bool:
        return not self.unexcused and not self.row_faults


@dataclass(frozen=True, slots=True)
class SetReport:
    """One prompt set.

    num_skipped: prompts above the token limit.  num_tokens: new tokens, those after each prompt included.
    committed_per_pass: THE figure, all committed tokens / all target passes, the prefill's token not counted and the last
        pass cut at the end of the text.  committed_by_prompt: mean over prompts of each prompt's own value.
    conditional[k]: P(draft k accepted | those before it were).  unconditional[k]: share of all passes with draft k accepted.
    lookup: committed tokens per pass of n-gram prompt look-up on the same texts.  repeats: share of 8-grams that stand
        earlier in the same answer.  ended: share of answers that end in an end token.
    lossless: None at a temperature above 0.  calibration: None without a confidence head.
    batched, single: speeds of the whole run, and of the first prompts one at a time.
    """

    name: str
    num_prompts: int
    num_skipped: int
    num_tokens: int
    num_passes: int
    committed_per_pass: float
    committed_by_prompt: float
    offered: tuple[int, ...]
    accepted: tuple[int, ...]
    conditional: tuple[float, ...]
    unconditional: tuple[float, ...]
    lookup: float
    repeats: float
    ended: float
    calibration: Calibration | None
    lossless: Lossless | None
    batched: Timing | None
    single: Timing | None


@dataclass(frozen=True, slots=True)
class Macro:
    """Means over the sets; pooled: all committed tokens / all passes of all sets."""

    committed_per_pass: float
    pooled: float
    committed_by_prompt: float
    conditional: tuple[float, ...]
    unconditional: tuple[float, ...]
    lookup: float
    repeats: float
    ended: float
    ece: float | None
    speed_up: float | None


def summarize(
    name: str,
    prompts: Sequence[Sequence[int]],
    drafted: Sequence[Generation],
    *,
    end_tokens: Collection[int],
    num_skipped: int = 0,
    lossless: Lossless | None = None,
    batched: Timing | None = None,
    single: Timing | None = None,
) -> SetReport:
    """The figures of one set from its drafted texts, one for each prompt.

    At temperature 0 these are the plain greedy texts (up to the ties that `lossless` counts), so that look-up and repeats
    are figures of the target's own text.

    Raises:
        ValueError: there is no prompt, or their number is not that of the texts.
    """
    if not prompts or len(prompts) != len(drafted):
        raise ValueError(f"set {name}: {len(prompts)} prompts and {len(drafted)} texts, wanted equal numbers of at least 1")
    passes = sum(text.num_passes for text in drafted)
    offered = tuple(map(sum, zip(*(text.offered for text in drafted), strict=True)))
    accepted = tuple(map(sum, zip(*(text.accepted for text in drafted), strict=True)))
    answers = [text.tokens for text in drafted]
    return SetReport(
        name=name,
        num_prompts=len(prompts),
        num_skipped=num_skipped,
        num_tokens=sum(map(len, answers)),
        num_passes=passes,
        committed_per_pass=_ratio(sum(sum(text.committed) for text in drafted), passes),
        # A text that its prefill has ended already has no pass, and nothing to say here.
        committed_by_prompt=_mean(text.committed_per_pass for text in drafted if text.num_passes),
        offered=offered,
        accepted=accepted,
        conditional=tuple(map(_ratio, accepted, offered)),
        unconditional=tuple(_ratio(count, passes) for count in accepted),
        lookup=lookup_per_pass(prompts, answers, num_drafts=len(offered)),
        repeats=repeated_share(answers),
        ended=sum(bool(answer) and answer[-1] in end_tokens for answer in answers) / len(answers),
        calibration=calibrate([pair for text in drafted for pair in text.confidence]),
        lossless=lossless,
        batched=batched,
        single=single,
    )


def macro_means(reports: Sequence[SetReport]) -> Macro:
    """Every set counts the same, whatever its number of prompts and passes."""
    errors = [report.calibration.ece for report in reports if report.calibration]
    timings = [timing.speed_up for report in reports if (timing := report.single or report.batched)]
    return Macro(
        committed_per_pass=fmean(report.committed_per_pass for report in reports),
        pooled=_ratio(sum(r.committed_per_pass * r.num_passes for r in reports), sum(r.num_passes for r in reports)),
        committed_by_prompt=fmean(report.committed_by_prompt for report in reports),
        conditional=tuple(map(fmean, zip(*(report.conditional for report in reports), strict=True))),
        unconditional=tuple(map(fmean, zip(*(report.unconditional for report in reports), strict=True))),
        lookup=fmean(report.lookup for report in reports),
        repeats=fmean(report.repeats for report in reports),
        ended=fmean(report.ended for report in reports),
        ece=fmean(errors) if errors else None,
        speed_up=fmean(timings) if timings else None,
    )


def check_lossless(
    plain: Sequence[Generation], drafted: Sequence[Generation], margin: float, row_faults: int | None = None
) -> Lossless:
    """Compare greedy texts one by one; see `compare_greedy` for what a tie excuses."""
    found = [compare_greedy(left, right, margin) for left, right in zip(plain, drafted, strict=True)]
    wrong = ((index, one) for index, one in enumerate(found) if not one.excused)
    return Lossless(
        margin=margin,
        equal=sum(one.equal for one in found),
        tied=sum(one.excused and not one.equal for one in found),
        unexcused=tuple(Difference(index, one.first_difference, one.margin) for index, one in wrong),
        near_ties=sum(text.near_ties(margin) for text in plain),
        row_faults=row_faults,
    )


def speed(plain: Sequence[Generation], drafted: Sequence[Generation], batch: int) -> Timing:
    """Tokens a second of runs over the same prompts, all passes after the prefill."""
    rates = [_ratio(sum(sum(t.committed) for t in texts), sum(t.seconds for t in texts)) for texts in (plain, drafted)]
    return Timing(len(drafted), batch, *rates, speed_up=_ratio(rates[1], rates[0]))


def calibrate(pairs: Sequence[tuple[float, bool]], num_bins: int = NUM_BINS) -> Calibration | None:
    """Pairs (estimate in [0, 1], accepted) in bins of equal width; None without a pair."""
    if not pairs:
        return None
    parts: list[list[tuple[float, bool]]] = [[] for _ in range(num_bins)]
    for estimate, stands in pairs:
        parts[min(int(estimate * num_bins), num_bins - 1)].append((estimate, stands))
    bins = tuple(CalibrationBin(len(part), _mean(p for p, _ in part), _mean(float(s) for _, s in part)) for part in parts)
    return Calibration(
        count=len(pairs),
        ece=sum(part.count * abs(part.mean_predicted - part.mean_observed) for part in bins) / len(pairs),
        mean_predicted=_mean(estimate for estimate, _ in pairs),
        mean_observed=_mean(float(stands) for _, stands in pairs),
        bins=bins,
    )


def repeated_share(answers: Iterable[Sequence[int]], size: int = REPEAT_NGRAM) -> float:
    """Share of the n-grams of all answers that stand earlier in the same answer (overlapping ones count)."""
    repeated = total = 0
    for answer in answers:
        grams = [tuple(answer[i : i + size]) for i in range(len(answer) - size + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return _ratio(repeated, total)


def lookup_per_pass(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], num_drafts: int) -> float:
    """Committed tokens per pass of n-gram prompt look-up over the given answers: all tokens / all passes."""
    counts = [lookup_passes(prompt, answer, num_drafts) for prompt, answer in zip(prompts, answers, strict=True)]
    return _ratio(sum(map(sum, counts)), sum(map(len, counts)))


def lookup_passes(prompt: Sequence[int], answer: Sequence[int], num_drafts: int) -> list[int]:
    """Tokens that each pass commits when the drafts are copied from prompt and answer so far.

    At each point the drafts are the tokens behind the most recent earlier occurrence of the longest suffix n-gram (4 to 1)
    that has one.  An occurrence so close to the end that its continuation runs into the drafts goes on copying them, so
    that a loop is drafted in full.  The first token of the answer comes from the prefill, as with a drafter.
    """
    text = [*prompt, *answer]
    seen: dict[tuple[int, ...], int] = {}
    counts, known, indexed = [], len(prompt) + 1, 0
    while known < len(text):
        # Only n-grams with a token behind them, which leaves out the suffix itself.
        for end in range(indexed + 1, known):
            seen.update((tuple(text[end - n : end]), end) for n in LOOKUP_NGRAMS if n <= end)
        indexed = known - 1
        source = next((seen[gram] for n in LOOKUP_NGRAMS if (gram := tuple(text[max(known - n, 0) : known])) in seen), None)
        accepted = 0 if source is None else _copied(text, known, source, num_drafts)
        counts.append(min(accepted + 1, len(text) - known))
        known += counts[-1]
    return counts


def _copied(text: list[int], known: int, source: int, num_drafts: int) -> int:
    """Leading drafts copied from `source` that equal the text from `known` on.  Up to the first miss the text itself stands
    for the drafts, so that a copy may run past `known`."""
    most = min(num_drafts, len(text) - known)
    return next((k for k in range(most) if text[source + k] != text[known + k]), most)


def _mean(values: Iterable[float]) -> float:
    return fmean(held) if (held := list(values)) else 0.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
