"""Did the trouble start in attention? What moved first before a spike, a divergence or a slow loss, from files alone.

trained.py     what a run's files tell, as arrays
order.py       which figures moved, when, and from when the loss was worse
judge.py       the events of a run, and the answer for each

Events:
    divergence      a loss or a gradient stopped being finite and ended the run
    degradation     the rate lies above the arm's best one and ends worse: validation loss higher in every seed that
                    finished at both rates, in the mean by more than its standard deviation over seeds at the best rate
                    and by 0.02 nats. Rates below the best one only learn less; that is no event
    loss spike, gradient spike    the first of a run, by OLMo-core's rule (stats.spikes)
The twin of a run is the finished one of the same arm, precision and seed at the arm's best rate: the same batches.

A figure has moved where it is 1.5 times what it was at step 0 and 1.5 times the twin's at the same step; without a
twin, 3 times what it was at step 0, since any training moves it, and for a spike 3 times what it was at the last probe
before the window of steps that it stands out of; where step 0 does not have it (the update-to-weight ratio, which is
taken per learning rate), the twin alone decides. A largest logit under 3 has not moved: it cannot make attention sharp.
Entropy and loss scale move by falling. The gradient norm is the median since the last probe; at step 0, the first
step's.
The loss is worse from its onset on: with D = loss - the twin's on the same batch, E = the median of D at the end, at
most 1 nat, and D clipped to +-E, that is where the running sum of D - E/4 is lowest (a CUSUM change point, Page 1954).
Without a twin, D is taken from the lowest mean of ten losses so far. The onset of a spike is its step.

Probes are sparse: a figure is known to have moved after one probe and by the next. It moved first where the later of
them lies before the onset, second where the earlier one does not, and else the order cannot be told.
    yes          the largest logit of a layer moved first; in a run that went on or diverged, it also stayed moved and
                 grew further. How large it is does not matter: the published bands come from other models
    no           the logits of no layer moved; or they moved second; or the loss scale of fp16 fell first; or the twin
                 spiked on the same batch
    cannot tell  all else. Entropy, norms and gradients are evidence; none of them makes a yes
"""

from retrofit.diagnose.judge import Answer, Diagnosis, Event, Reason, diagnose
from retrofit.diagnose.order import Movement
from retrofit.diagnose.trained import Trained

__all__ = ["Answer", "Diagnosis", "Event", "Movement", "Reason", "Trained", "diagnose"]
