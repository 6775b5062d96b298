"""Gateway for agents with OpenAI's and Anthropic's APIs: sessions that keep the token ids of every answer, in front of any engine."""
