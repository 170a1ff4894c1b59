"""Trained models as files that other programs run: ONNX and `torch.export`."""
