from .halves import FP16 as FP16
from .halves import BF16 as BF16
from .int8 import Int8 as Int8
from .onebit import OneBit as OneBit
from .threshold import Threshold as Threshold
from .topk import TopK as TopK
