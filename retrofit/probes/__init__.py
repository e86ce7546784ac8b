"""What attention does, read from the live computation, which it does not change.

With q, k of one head as they enter attention (after norm and rotation), d = head_dim, s the scale and b the mask or
bias, softmax sees the logits l_ij = s * q_i . k_j + b_ij. Masked logits are left out everywhere.

    q_rms, k_rms        sqrt(mean over tokens and channels of x^2)
    .._max              the largest token's sqrt(mean over channels of x^2)
    .._cv               coefficient of variation over tokens of the same: deviation / mean; 0 where all are equally long
    .._projected        each of these before a norm of retrofit's; the same again without one, as rotations keep lengths
    key_common_share    |mean k|^2 / mean |k|^2: the share of key energy that all tokens have in common
    logit_max, _absmax  largest l_ij, largest |l_ij|
    logit_spread        largest max_j l_ij - min_j l_ij
    logit_p50, _p99     percentiles of l_ij, from fixed bins, 64 to every doubling: to about 1 percent of the value
    entropy             mean over rows of -sum_j p_ij log p_ij, p = softmax(l), in nats
    entropy_share       the same, each row divided by the logarithm of its number of visible keys; 1 is uniform
    .._min_head         the least of the heads'; .._prefix, .._patch: of class and register tokens' rows, of the others'
    low_entropy_heads   share of heads whose entropy_share is under 0.05
    peaked_rows         share of rows whose largest p exceeds 0.95
    logit_bound         the largest |l| that a QK-Norm allows (norms.logit_bound), plus the largest |b|; else None
    gain_q, gain_k      root mean square over channels of a QK-Norm's gain, a value a head; None without one

Everything is computed in float32 from detached tensors, in blocks of rows: no N x N map of all heads is held.
Low entropy alone is no fault; sharp attention is needed at borders and for matches.
"""

from retrofit.probes.attention import AttentionStats, Sample, gains_per_head
from retrofit.probes.context import Probe, probe
from retrofit.probes.lengths import Lengths

__all__ = ["AttentionStats", "Lengths", "Probe", "Sample", "gains_per_head", "probe"]
