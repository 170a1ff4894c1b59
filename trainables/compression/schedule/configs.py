"""Arguments of every class of a schedule: one frozen, strict pydantic model per class. Does not import torch.

`PRUNERS`, `REGULARIZERS`, `QUANTIZERS`, `EXTENSIONS` and `DISTILLERS` map the classes' names in YAML to the models.
"""

from trainables.compression.schedule.config_base import ComponentConfig
from trainables.compression.schedule.distiller_configs import DISTILLERS
from trainables.compression.schedule.extension_configs import EXTENSIONS
from trainables.compression.schedule.pruner_configs import PRUNERS
from trainables.compression.schedule.quantizer_configs import QUANTIZERS
from trainables.compression.schedule.regularizer_configs import REGULARIZERS

__all__ = ["DISTILLERS", "EXTENSIONS", "PRUNERS", "QUANTIZERS", "REGULARIZERS", "ComponentConfig"]
