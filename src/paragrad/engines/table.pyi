from .local import Local as Local
from .vector import Vector as Vector
from .network import Network as Network
