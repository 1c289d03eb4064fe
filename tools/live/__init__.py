"""A real vLLM server beside the simulator: loads are served, recorded, replayed and predicted."""
