/** mongo-java-server with its data in memory, on a port of 127.0.0.1: `java -cp 'jars/*' Main.java PORT`. */
import de.bwaldvogel.mongo.MongoServer;
import de.bwaldvogel.mongo.backend.memory.MemoryBackend;

public class Main {
    public static void main(String[] arguments) throws InterruptedException {
        new MongoServer(new MemoryBackend()).bind("127.0.0.1", Integer.parseInt(arguments[0]));
        Thread.currentThread().join();
    }
}
