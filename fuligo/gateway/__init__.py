"""OpenAI-compatible gateway for agents: sessions that keep the token ids of every answer, in front of any engine."""
