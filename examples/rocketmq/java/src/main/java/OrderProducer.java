import static java.nio.charset.StandardCharsets.UTF_8;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.Arrays;
import java.util.List;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/**
 * Books orders and sends them, both or neither: {@code OrderProducer ADDRESS FILE [ORDER…] [--crash] [--stay]}.
 *
 * The file stands for a database. With {@code --crash} it dies between booking and commit, with {@code --stay} it stays
 * to be asked about orders that were left so.
 */
public final class OrderProducer {
    public static void main(String[] arguments) throws Exception {
        List<String> words = Arrays.asList(arguments);
        Path booked = Path.of(words.get(1));
        ClientServiceProvider provider = ClientServiceProvider.loadService();
        try (Producer producer = provider.newProducerBuilder()
            .setClientConfiguration(
                ClientConfiguration.newBuilder().setEndpoints(words.get(0)).enableSsl(false).build())
            .setTopics("orders")
            .setTransactionChecker(message -> check(message, booked))
            .build()) {
            for (String order : words.subList(2, words.size())) {
                if (order.startsWith("--")) {
                    continue;
                }
                Transaction transaction = producer.beginTransaction();
                Message message = provider.newMessageBuilder().setTopic("orders").setKeys(order)
                    .setBody(order.getBytes(UTF_8)).build();
                producer.send(message, transaction);
                Files.writeString(booked, order + "\n", StandardOpenOption.CREATE, StandardOpenOption.APPEND);
                if (words.contains("--crash")) {
                    Runtime.getRuntime().halt(1);
                }
                transaction.commit();
                System.out.println("sent " + order);
            }
            if (words.contains("--stay")) {
                System.out.println("ready");
                Thread.currentThread().join();
            }
        }
    }

    /** Was it booked? Asked for an order whose producer has died, or whose commit was lost. */
    static TransactionResolution check(MessageView message, Path booked) {
        String order = UTF_8.decode(message.getBody()).toString();
        try {
            boolean known = Files.exists(booked) && Files.readAllLines(booked).contains(order);
            System.out.println("asked about " + order + ": " + (known ? "booked" : "not booked"));
            return known ? TransactionResolution.COMMIT : TransactionResolution.ROLLBACK;
        } catch (IOException error) {
            throw new UncheckedIOException(error); // no answer: asked again
        }
    }
}
