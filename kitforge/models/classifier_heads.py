"""The names of classifiers and of the tensors of their heads in transformers and PEFT."""

from kitforge.core.nn.score_head import HEAD, HEAD_BIAS, POOLER, POOLER_BIAS

# The suffixes of classifiers in transformers: of whole texts, of each token, and of the spans of answers.
SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER = "ForSequenceClassification", "ForTokenClassification"
QUESTION_ANSWERING = "ForQuestionAnswering"
_TOKEN_HEADS = dict.fromkeys(("gpt2", "bloom", "bert", "roberta", "xlm-roberta"), "classifier")
# The modules of a head with a pooler.
_POOLED = {
    "bert": ("bert.pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "xlm-roberta": ("classifier.dense", "classifier.out_proj"),
}


def head_names(model_type: str, suffix: str) -> dict[str, str]:
    """The names of a classifier's tensors in transformers by ours."""
    if suffix != SEQUENCE_CLASSIFIER:
        theirs = "qa_outputs" if suffix == QUESTION_ANSWERING else _TOKEN_HEADS.get(model_type, "score")
        return {HEAD: f"{theirs}.weight", HEAD_BIAS: f"{theirs}.bias"}
    if model_type not in _POOLED:
        return {HEAD: HEAD}
    pooler, head = _POOLED[model_type]
    ours = {POOLER: pooler, POOLER_BIAS: pooler, HEAD: head, HEAD_BIAS: head}
    return {name: f"{module}.{name.rpartition('.')[2]}" for name, module in ours.items()}


def own_name(theirs: str) -> str | None:
    """Our name of the tensor of a head in an adapter; None for another tensor."""
    return theirs if theirs.startswith("score.") else _OURS.get(theirs)


_OURS = {
    theirs: ours
    for suffix in (SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER)
    for model_type in _TOKEN_HEADS
    for ours, theirs in head_names(model_type, suffix).items()
}
