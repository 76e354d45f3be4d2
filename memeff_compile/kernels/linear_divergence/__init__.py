"""The divergence between the softmaxes of two output projections in one op, without the N x V
logits of either projection.

Distillation compares the softmax p of a student's logits with the softmax q of a teacher's logits,
over the whole vocabulary. With m = share * q + (1 - share) * p, the op returns for each row this
sum of six terms:

    a1 sum(q log q) + a2 sum(q log p) + a3 sum(p log p) + a4 sum(p log q)
                    + a5 sum(q log m) + a6 sum(p log m)

The class `Coefficients` contains a1 to a6 and `share`. KL(q || p), KL(p || q), the generalised
Jensen-Shannon divergence, skewed divergences and the cross entropy with the teacher's probabilities
are such sums. The student's logits are scale * (hidden @ weight.T + bias). The teacher's logits are
computed in the same way from the teacher's hidden states and weight, which may have another hidden
size. Alternatively, the caller passes the teacher's logits. The op computes no gradient for the
teacher.

For each block of rows, two matrix products compute the logits of student and teacher. From these
logits, the op computes row statistics in fp32, then the gradient of the student's logits, which
overwrites the logits. A scalar loss takes four matrix products, including gradients. A loss per row
takes six, because the backward pass computes the logits again.
"""

from __future__ import annotations

from .call import Coefficients as Coefficients
from .memory import bytes_after as bytes_after
from .memory import bytes_before as bytes_before
from .memory import cost_of_few_rows as cost_of_few_rows
from .memory import temporary_bytes as temporary_bytes
from .op import ENGINES as ENGINES
from .op import engine_for as engine_for
from .op import linear_divergence as linear_divergence
from .op import linear_divergence_backward as linear_divergence_backward
from .op import linear_divergence_classes as linear_divergence_classes
from .op import linear_divergence_classes_backward as linear_divergence_classes_backward
from .op import linear_divergence_total as linear_divergence_total
from .op import makes_gradients_in_forward as makes_gradients_in_forward
from .op import supports as supports
from .op import supports_classes as supports_classes
