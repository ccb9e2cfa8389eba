import static java.nio.charset.StandardCharsets.UTF_8;

import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;

/** Receives orders: {@code OrderConsumer ADDRESS [GROUP]}; prints "reporting got o-1 (attempt 1)". */
public final class OrderConsumer {
    public static void main(String[] arguments) throws Exception {
        String group = arguments.length > 1 ? arguments[1] : "reporting";
        // TLS is this client's default: leave enableSsl out where the server has a certificate.
        ClientConfiguration configuration =
            ClientConfiguration.newBuilder().setEndpoints(arguments[0]).enableSsl(false).build();
        CountDownLatch end = new CountDownLatch(1);
        Runtime.getRuntime().addShutdownHook(new Thread(end::countDown));
        try (PushConsumer consumer = ClientServiceProvider.loadService().newPushConsumerBuilder()
            .setClientConfiguration(configuration)
            .setConsumerGroup(group)
            .setSubscriptionExpressions(new HashMap<>(Map.of("orders", FilterExpression.SUB_ALL)))
            .setMessageListener(message -> {
                // What isn't a success comes again; the server renews the message's lease meanwhile.
                String order = UTF_8.decode(message.getBody()).toString();
                System.out.println(group + " got " + order + " (attempt " + message.getDeliveryAttempt() + ")");
                return ConsumeResult.SUCCESS;
            })
            .build()) {
            end.await();
        }
    }
}
