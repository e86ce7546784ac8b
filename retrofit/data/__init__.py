"""Images: from a source to splits, and from a split to normalised batches.

Nothing here leans on the global random states, and nothing leaves them changed: what is drawn hangs on a key.
"""

from retrofit.data.batches import Batch, Part, eval_batches, share, steps_per_epoch, train_batches, train_transform
from retrofit.data.images import Images
from retrofit.data.keyed import keyed_rng, keyed_seed
from retrofit.data.mixing import mixed
from retrofit.data.splits import Splits, open_images, open_splits

__all__ = [
    "Batch",
    "Images",
    "Part",
    "Splits",
    "eval_batches",
    "keyed_rng",
    "keyed_seed",
    "mixed",
    "open_images",
    "open_splits",
    "share",
    "steps_per_epoch",
    "train_batches",
    "train_transform",
]
