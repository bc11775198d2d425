"""Which block rows predict the drafts: the one place that knows the slot rule."""

from dspark_model.config import DrafterConfig


def draft_rows(config: DrafterConfig, num_drafts: int) -> slice:
    """Rows of the block whose logits predict drafts 0 .. num_drafts - 1.

    With shifted labels (`sample_from_anchor`) the block has K rows at positions P + 1 .. P + K, row j predicts the token at
    P + 2 + j, and rows 0 .. K - 1 are read.  With the plain DFlash rule the block has K + 1 rows, a mask row predicts the
    token at its own position, and rows 1 .. K are read.  Either way draft j is the token at position P + 2 + j.
    """
    return slice(0, num_drafts) if config.sample_from_anchor else slice(1, num_drafts + 1)
