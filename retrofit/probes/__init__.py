"""What attention does, read from the live computation, which it does not change.

With q, k of one head as they enter attention (after norm and rotation), d = head_dim, s the scale and b the mask or
bias, softmax sees the logits l_ij = s * q_i . k_j + b_ij. Masked logits are left out everywhere.

    q_rms, k_rms            sqrt(mean over tokens and channels of x^2)
    q_rms_max, k_rms_max    the largest token's sqrt(mean over channels of x^2)
    q_cv, k_cv              coefficient of variation over tokens of the same: deviation / mean
    .._projected            each of these six before the norm that retrofit placed; without one the same, as rotations
                            keep lengths
    key_common_share        |mean k|^2 / mean |k|^2: the share of key energy that all tokens have in common
    logit_max, logit_absmax    largest l_ij, largest |l_ij|
    logit_spread            largest max_j l_ij - min_j l_ij
    logit_p50, logit_p99    percentiles of l_ij, from fixed bins, 64 to every doubling: to about 1 percent of the value
    entropy                 mean over rows of -sum_j p_ij log p_ij, p = softmax(l), in nats
    entropy_share           the same, each row divided by the logarithm of its number of visible keys; 1 is uniform
    entropy_share_min_head  the least of the heads' entropy_share
    entropy_share_prefix, entropy_share_patch    that of class and register tokens' rows, that of the others'
    low_entropy_heads       share of heads whose entropy_share is under 0.05
    peaked_rows             share of rows whose largest p exceeds 0.95
    logit_bound             the largest |l| that a QK-Norm without bias allows, plus the
                            largest |b|
    gain_q, gain_k          root mean square over channels of a QK-Norm's gain, a value a head

Of a layer, what is called a largest is that over heads, an rms the root of the mean square, all else the mean.
Everything is computed in float32 from detached tensors, in blocks of rows: no N x N map of all heads is held.
Low entropy alone is no fault; sharp attention is needed at borders and for matches.
"""

from retrofit.probes.attention import AttentionStats, Sample, gains_per_head
from retrofit.probes.context import Probe, probe
from retrofit.probes.lengths import Lengths

__all__ = ["AttentionStats", "Lengths", "Probe", "Sample", "gains_per_head", "probe"]
