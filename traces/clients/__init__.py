"""Result files of benchmark clients: the requests that a client sent and their latencies. One module per client."""
