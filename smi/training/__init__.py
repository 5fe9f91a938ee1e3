"""Training: the LightningModule, its loss, its optimizer and its callbacks."""
