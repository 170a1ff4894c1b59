"""Names of the attributes by which an Optuna trial tells which outcome it trains."""

from __future__ import annotations

#: Identity of the outcome as it was predicted when it was chosen (`Outcome.identity`); or that none was predicted.
OUTCOME, UNPREDICTED = "outcome", "unpredicted"
#: Epochs of the run, a parameter, too, and those of the full run; only of a trial that is shorter than the full run.
EPOCHS, OF_EPOCHS = "epochs", "of_epochs"
#: Compute that the outcome is predicted to save, a fraction of that of the full run (`Outcome.saved`).
PREDICTED = "predicted_saved"
#: All of them: a trial that is begun again has them, too.
CHOSEN = (OUTCOME, UNPREDICTED, EPOCHS, OF_EPOCHS, PREDICTED)
