"""The models of the papers on sparse all-reduces, and the demo's net, in Flax.

A model's constructor takes its sizes, so that the published model and a small one are the same
class. ``loss(*batch)`` is the mean loss of a batch. ``accuracy(*batch)`` is the share that is
predicted correctly. There is no dropout: the gradient depends on the batch alone.
"""

from .bert import Bert
from .convnet import ConvNet
from .fnn import FNN
from .intent import Intent
from .lstm import LSTM, LanguageModel
from .resnet import ResNet
from .speech import DeepSpeech
from .transformer import Transformer
from .vgg import VGG

__all__ = ["FNN", "LSTM", "VGG", "Bert", "ConvNet", "DeepSpeech", "Intent", "LanguageModel", "ResNet", "Transformer"]
