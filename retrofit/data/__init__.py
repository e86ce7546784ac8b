"""Images: from a source to splits, and from a split to normalised batches.

Nothing here leans on the global random states, and nothing leaves them changed: what is drawn hangs on a key.
"""

from retrofit.data.batches import Batch, eval_batches, steps_per_epoch, train_batches
from retrofit.data.images import Images
from retrofit.data.keyed import keyed_rng, keyed_seed
from retrofit.data.splits import Splits, open_images, open_splits

__all__ = [
    "Batch",
    "Images",
    "Splits",
    "eval_batches",
    "keyed_rng",
    "keyed_seed",
    "open_images",
    "open_splits",
    "steps_per_epoch",
    "train_batches",
]
