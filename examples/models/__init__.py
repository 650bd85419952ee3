"""The models of the papers on sparse all-reduces, in Flax.

A model's constructor takes its sizes, so that the published model and a small one are the same
class. Each has ``loss(*batch)``, the mean loss of a batch. All but DeepSpeech have
``accuracy(*batch)``, the share that is predicted correctly. There is no dropout: the gradient
depends on the batch alone.
"""

from .bert import Bert
from .fnn import FNN
from .intent import Intent
from .lstm import LSTM, LanguageModel
from .resnet import ResNet
from .speech import DeepSpeech
from .transformer import Transformer
from .vgg import VGG

__all__ = ["FNN", "LSTM", "VGG", "Bert", "DeepSpeech", "Intent", "LanguageModel", "ResNet", "Transformer"]
