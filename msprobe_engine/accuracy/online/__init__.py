"""The way of messages from a training to a benchmark host: TCP with TLS, or a shared directory. No message is ever unpickled.

A message is a JSON header and a payload (a safetensors file by convention of those who use this). A client numbers its messages from 1;
a server hands each of them to its handler once and in this order, and acknowledges it when the handler has returned. What was not
acknowledged is sent again after a lost connection, so nothing is lost as long as the client lives and its queue has room.
"""
