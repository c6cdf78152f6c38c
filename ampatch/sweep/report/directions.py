"""Tells from the name of a metric whether lower or higher is better.

A name is split into words: at characters that are not letters, at capitals (`valLoss`) and around
the long words of `_EMBEDDED_WORDS` (`valloss`).  Plurals of listed words count too.

    logloss, val/MSELoss, testErr, top5_error   lower
    mAP50, val_acc, F1, ROUGE-L                 higher
    lr, loss_scale, 1-ssim, tpr@fpr             None: the user is asked (`--better`)
"""

from __future__ import annotations

import re
import shlex

_LOWER_WORDS = """
    loss logloss error err perplexity ppl mse mae rmse nmse nrmse msle rmsle mape mAPE smape wape
    mase nll negloglikelihood bce ce cross_entropy crossentropy xent kl kld js jsd divergence hinge
    bpc bpb bpd bits wer cer ter mer der eer fpr fnr fid FID kid fvd fad lpips dists ece mce brier
    crps epe mpjpe emd chamfer hausdorff hd95 distance regret cost residual inaccuracy
    misclassification mistake incorrect wrong seconds time medae false_positive false_negative
"""
_HIGHER_WORDS = """
    accuracy acc f1 f2 fbeta auc auroc rocauc auprc prauc roc ap map mAP iou IoU miou mIoU giou
    jaccard dice dsc bleu sacrebleu rouge meteor cider CIDEr chrf chrF bertscore exact_match em
    pass@1 pass@10 pass@100 psnr ssim msssim vmaf snr sdr pesq stoi mos r2 r_squared rsquared
    correlation corr spearman spearmanr pearson pearsonr kappa qwk mcc nmi ari recall precision
    specificity tpr tnr mrr ndcg nDCG dcg hits hit_rate win_rate success_rate pass_rate success
    correct similarity agreement reward return elo elbo fitness likelihood loglikelihood log_prob
    logprob prec loglik bacc sensitivity explained_variance winrate pck sisdr
"""
_GENERIC_WORDS = "score top1 top2 top3 top5 top10 topk"  # higher, without a word listed above
# A name with such a word has no direction: a drop of accuracy is not an accuracy.
_QUALIFIERS = """
    scale scaling weight loss_coef loss_coefficient threshold std stdev stderr sd var variance gap
    drop delta diff difference change improvement increase decrease reduction neg negative negated
    minus inverse inverted
"""
_PREPOSITIONS = {"at", "per", "over", "vs", "by", "to"}  # a quantity in terms of another
_EMBEDDED_WORDS = "loss|error|perplexity|accuracy|precision|recall|reward"

_WORD = re.compile(r"[A-Z]{2,}s(?![a-z])|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_TEXT_THEN_EMBEDDED = re.compile(
    rf"\b(?!inaccura|imprecis)([a-z]{{2,}})((?:{_EMBEDDED_WORDS})(?:e?s)?)\b"
)
_SPLIT = re.compile(r"\b(best|dev|eval|test|train|val|valid)(acc|err|mae|mse|nll|ppl|rmse|wer)\b")
_EMBEDDED_THEN_TEXT = re.compile(rf"\b({_EMBEDDED_WORDS})(?!less|iness)([a-z]{{2,}})\b")
_COMPLEMENT = re.compile(r"\s*(1|1\.0|100)?\s*-")  # 1-ssim, -loss
_NLL = re.compile(r"\bneg(ative)? log likelihood\b")


def direction(name: str) -> str | None:
    """Whether "higher" or "lower" is better for a metric of this name; None if unknown.

    For a name with words of both lists it is None, unless the last is in `_LOWER_WORDS`:
    lower is better for `dice_loss` and `accuracy_error`.
    """
    words = _NLL.sub("nll", _words(name))
    if _COMPLEMENT.match(name) or _QUALIFIED_NAME.search(words):
        return None
    ways = [match.lastgroup for match in _LISTED_WORD.finditer(words)]
    ways = [way for way in ways if way != "generic"] or ["higher" for way in ways]
    if len(set(ways)) > 1:
        is_relative = "@" in name or not _PREPOSITIONS.isdisjoint(words.split())
        return "lower" if ways[-1] == "lower" and not is_relative else None
    return ways[0] if ways else None


def direction_options(name: str) -> str:
    """The command-line options for both directions of a metric: `--better X=lower or ...`."""
    lower, higher = (shlex.quote(f"{name}={way}") for way in ("lower", "higher"))
    return f"--better {lower} or --better {higher}"


def _words(name: str) -> str:
    """The words of a name in lower case, separated by spaces."""
    words = _SPLIT.sub(r"\1 \2", " ".join(_WORD.findall(name)).lower())
    return _EMBEDDED_THEN_TEXT.sub(r"\1 \2", _TEXT_THEN_EMBEDDED.sub(r"\1 \2", words))


def _any_of(listed: str) -> str:
    """A pattern that matches the words of a list and their plurals, the longest first."""
    spaced = sorted({_words(word) for word in listed.split()}, key=len, reverse=True)
    return "|".join(map(_with_plural, spaced))


def _with_plural(word: str) -> str:
    if word.endswith("y"):
        return f"{word[:-1]}(?:y|ies)"
    return f"{word}(?:es)?" if word.endswith("s") else f"{word}s?"


_QUALIFIED_NAME = re.compile(rf"\b(?:{_any_of(_QUALIFIERS)})\b")
_LISTED_WORD = re.compile(
    rf"\b(?:(?P<lower>{_any_of(_LOWER_WORDS)})|(?P<higher>{_any_of(_HIGHER_WORDS)})"
    rf"|(?P<generic>{_any_of(_GENERIC_WORDS)}))\b"
)
