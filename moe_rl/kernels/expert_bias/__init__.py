"""The bias of each expert's linear layer (gpt-oss): how it is added, and its gradient."""
