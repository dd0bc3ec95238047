from machinery_py import Server

server = Server()


@server.task
def add(a: int, b: int) -> int:
    return a + b
