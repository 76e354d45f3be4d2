"""Functions for the private names of PyTorch that this package uses, one function for each use.

The folder has one file per component of PyTorch, such as Dynamo and Inductor. Other modules import
the folder `compat`, never its files. After a torch release, `tests/test_compat.py` checks every
name and shows which names no longer work.
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
