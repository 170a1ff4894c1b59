"""What every class of a schedule takes: one frozen, strict model a class. Loads no torch.

`PRUNERS`, `REGULARIZERS`, `QUANTIZERS`, `EXTENSIONS` and `DISTILLERS` hold the models by the class's name in YAML.
"""

from trainables.compression.settings.base import Settings
from trainables.compression.settings.distillers import DISTILLERS
from trainables.compression.settings.extensions import EXTENSIONS
from trainables.compression.settings.pruners import PRUNERS
from trainables.compression.settings.quantizers import QUANTIZERS
from trainables.compression.settings.regularizers import REGULARIZERS

__all__ = ["DISTILLERS", "EXTENSIONS", "PRUNERS", "QUANTIZERS", "REGULARIZERS", "Settings"]
