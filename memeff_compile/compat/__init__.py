"""The private torch names this package leans on, each behind one function.

One file per mechanism of PyTorch. This is their door: the rest of the package imports ``compat``.
After a torch release ``tests/test_compat.py``, which probes every name, says which one to mend.
"""

from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.utils import _pytree

from .autograd import *
from .compiled import *
from .distributed import *
from .dynamo import *
from .inductor import *
from .sizes import *
from .tensors import *

pytree = _pytree
